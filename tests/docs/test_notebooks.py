"""The notebooks run from their first cell to their last, and what they are kept with is what they print."""

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the kernel


@pytest.fixture(scope="module")
def ran():
    """Of each notebook, by its name, what is kept and what came of running it now."""
    import nbformat
    from run_notebooks import SWAP, TOUR, run

    paths = TOUR, SWAP
    return {path.stem: (nbformat.read(path, as_version=4), now) for path, now in zip(paths, run(*paths))}


def kinds(notebook):
    """Of every cell the kinds of its outputs."""
    return [
        [sorted(output.get("data", {"text": ""})) for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def texts(notebook):
    """What cells printed, by cell."""
    return ["".join(output.get("text", "") for output in cell.get("outputs", ())) for cell in notebook.cells]


def test_tour(ran):
    kept, now = ran["tour"]
    assert kinds(now) == kinds(kept)
    assert ["image/png", "text/plain"] in sum(kinds(now), [])
    counted = [text for text in texts(now) if "FLOPs a token" in text]
    assert counted == [text for text in texts(kept) if "FLOPs a token" in text]
    (differences,) = [text for text in texts(now) if "differs by" in text]
    assert max(float(line.split()[-1]) for line in differences.splitlines()) < 1e-12


def test_swapping_attention(ran):
    kept, now = ran["swap"]
    assert kinds(now) == kinds(kept)
    for word in ("parameters", " bytes"):
        assert [text for text in texts(now) if word in text] == [text for text in texts(kept) if word in text]
    (losses,) = [text for text in texts(now) if "->" in text]
    assert all(float(line.split()[-1]) < 0.6 * float(line.split()[-3]) for line in losses.splitlines())


def test_is_a_page(tmp_path):
    from generator.notebook import generate
    from run_notebooks import TOUR

    (tmp_path / "tour.ipynb").write_bytes(TOUR.read_bytes())
    generate(tmp_path)
    page = (tmp_path / "tour.md").read_text(encoding="utf-8")
    assert page.startswith("# A tour") and "FLOPs a token" in page
    pictures = list((tmp_path / "assets" / "small").glob("tour_*.png"))
    assert len(pictures) == page.count("![](") == 2
