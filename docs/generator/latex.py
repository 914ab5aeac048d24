"""Formulas of the annotated pages: a subset of LaTeX as MathML, which browsers draw without a script or a network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[A-Za-z]|\d+(?:[.,]\d+)*|\s+|.", re.DOTALL)
GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ϵ", "varepsilon": "ε", "zeta": "ζ", "eta": "η",
    "theta": "θ", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ",
    "tau": "τ", "phi": "ϕ", "varphi": "φ", "chi": "χ", "psi": "ψ", "omega": "ω", "Gamma": "Γ", "Delta": "Δ",
    "Theta": "Θ", "Lambda": "Λ", "Sigma": "Σ", "Phi": "Φ", "Psi": "Ψ", "Omega": "Ω", "ell": "ℓ",
}  # fmt: skip
SIGNS = {
    "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠", "approx": "≈", "sim": "∼", "propto": "∝",
    "in": "∈", "notin": "∉", "to": "→", "rightarrow": "→", "leftarrow": "←", "mapsto": "↦", "cdot": "⋅", "times": "×",
    "odot": "⊙", "otimes": "⊗", "oplus": "⊕", "circ": "∘", "ast": "∗", "top": "⊤", "infty": "∞", "partial": "∂",
    "nabla": "∇", "ldots": "…", "dots": "…", "cdots": "⋯", "prime": "′", "pm": "±", "mid": "∣", "ll": "≪", "gg": "≫",
    "equiv": "≡", "cup": "∪", "cap": "∩", "subset": "⊂", "forall": "∀", "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈",
    "rceil": "⌉", "langle": "⟨", "rangle": "⟩", "Vert": "‖", "vert": "|", "star": "⋆", "emptyset": "∅", "wedge": "∧",
    "{": "{", "}": "}", "|": "‖", "-": "−", "%": "%", "_": "_", "&": "&", "#": "#",
}  # fmt: skip
BIG = {"sum": "∑", "prod": "∏", "int": "∫", "bigcup": "⋃"}
FUNCTIONS = {"exp", "log", "ln", "sin", "cos", "tanh", "max", "min", "arg", "det", "lim", "dim", "sup", "inf"}
SPACES = {"quad": "1em", "qquad": "2em", ",": "0.17em", ";": "0.28em", ":": "0.22em", " ": "0.3em", "!": "0"}
ACCENTS = {
    "hat": "^",
    "tilde": "~",
    "bar": "‾",
    "overline": "‾",
    "vec": "→",
    "dot": "˙",
    "widehat": "^",
    "widetilde": "~",
}
STYLES = {"mathrm": "normal", "mathbf": "bold", "mathbb": "double-struck", "mathcal": "script", "mathit": "italic"}


def mathml(formula: str, display: bool = False) -> str:
    """Return a formula as a ``<math>`` element; ValueError for LaTeX outside the subset."""
    tokens = TOKEN.findall(formula.strip())
    row = _Row(tokens)
    content = row.read(None)
    mode = ' display="block"' if display else ""
    return f'<math{mode} aria-label="{escape(" ".join(formula.split()))}">{content}</math>'


class _Row:
    """Reads tokens from the left, one atom with its scripts at a time."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at = tokens, 0

    def read(self, end: str | None) -> str:
        """Return all atoms up to the token ``end``, which is consumed, or up to the end of the formula."""
        return f"<mrow>{''.join(self._atoms(end))}</mrow>"

    def _atoms(self, end: str | None) -> Iterator[str]:
        while (token := self._next()) is not None:
            if token == end:
                return
            yield self._scripts(token)
        if end is not None:
            raise ValueError(f"a formula ends before {end}")

    def _next(self) -> str | None:
        while self.at < len(self.tokens):
            token, self.at = self.tokens[self.at], self.at + 1
            if not token.isspace():
                return token
        return None

    def _argument(self) -> str:
        token = self._next()
        if token is None:
            raise ValueError("a formula ends where an argument is expected")
        return self.read("}") if token == "{" else self._atom(token)

    def _scripts(self, token: str) -> str:
        base = self._atom(token)
        scripts: dict[str, str] = {}
        while True:
            here, mark = self.at, self._next()
            if mark not in ("_", "^"):
                self.at = here
                break
            scripts[mark] = self._argument()
        below = token.removeprefix("\\") in BIG | {"max": "", "min": "", "lim": ""}
        tag = ("munder", "mover", "munderover") if below else ("msub", "msup", "msubsup")
        match scripts:
            case {"_": low, "^": high}:
                return f"<{tag[2]}>{base}{low}{high}</{tag[2]}>"
            case {"_": low}:
                return f"<{tag[0]}>{base}{low}</{tag[0]}>"
            case {"^": high}:
                return f"<{tag[1]}>{base}{high}</{tag[1]}>"
        return base

    def _atom(self, token: str) -> str:
        if token == "{":
            return self.read("}")
        if token.startswith("\\"):
            return self._command(token[1:])
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        if token.isalpha():
            return f"<mi>{token}</mi>"
        return f"<mo{_flat(token)}>{escape({'-': '−', '*': '∗', chr(39): '′'}.get(token, token))}</mo>"

    def _command(self, name: str) -> str:
        if name in GREEK:
            return f"<mi>{GREEK[name]}</mi>"
        if name in SIGNS:
            return f"<mo{_flat(name)}>{escape(SIGNS[name])}</mo>"
        if name in BIG:
            return f"<mo>{BIG[name]}</mo>"
        if name in FUNCTIONS:
            return f"<mi>{name}</mi>"
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}"></mspace>'
        if name in ("frac", "dfrac", "tfrac"):
            return f"<mfrac>{self._argument()}{self._argument()}</mfrac>"
        if name == "sqrt":
            return f"<msqrt>{self._argument()}</msqrt>"
        if name in ACCENTS:
            return f'<mover accent="true">{self._argument()}<mo stretchy="false">{ACCENTS[name]}</mo></mover>'
        if name in STYLES:
            return self._styled(STYLES[name])
        if name in ("left", "right"):
            mark = self._next() or "."
            sign = "" if mark == "." else SIGNS.get(mark.removeprefix("\\"), mark)
            return f'<mo fence="true" stretchy="true">{escape(sign)}</mo>'
        raise ValueError(f"the site does not typeset \\{name}")

    def _styled(self, style: str) -> str:
        start = self.at
        content = self._argument()
        if style == "normal":  # letters of one word stand together
            word = "".join(self.tokens[start : self.at]).strip("{} ")
            word = re.sub(r"\\[,; _]", lambda match: "_" if match[0] == "\\_" else " ", word)
            if "\\" not in word and "^" not in word:
                return f'<mi mathvariant="normal">{escape(word)}</mi>'
        return content.replace("<mi>", f'<mi mathvariant="{style}">')


def _flat(sign: str) -> str:
    """Brackets without ``left`` and ``right`` keep their size."""
    return ' stretchy="false"' if sign in "()[]|{}" or sign in ("lfloor", "rfloor", "langle", "rangle", "vert") else ""
