"""Formulas typeset: lines of a docstring as MathML, which browsers draw by themselves, without a script or a font.

    softmax_j(q_i . k_j) v_j over the last ``window`` tokens

becomes a sum of symbols with indices, prose and code. A word of two letters or more is a name where it is a function,
has an index or an argument, or stands at an operator; a run of other words is prose, at which a line may break.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "eps": "ε", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ",
    "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ", "chi": "χ",
}  # fmt: skip
SIGNS = {
    "->": "→", "<-": "←", "<=": "≤", ">=": "≥", "-": "−", "*": "∗", ".": "·", "...": "…", "..": "…", "~": "~",
}  # fmt: skip
BIG = {"sum": "∑", "prod": "∏"}
NAMES = {
    "softmax", "exp", "sin", "cos", "log", "ln", "relu", "sigmoid", "tanh", "argmax", "clamp", "clip", "norm", "concat",
    "roll", "diag", "sqrt", "seg", "sg", "score", "scale", "rotate", "dim", "width", "base", "factor", "position",
    "segment", "memory", "local", "external", "max_distance", "head_dim", "max_length", "threshold", "out", "LSTM",
    "MLP", "PE", "attend", "compress", "expand", "step", "signal", "LL", "leaky_relu", "decay_tokens",
}  # fmt: skip
"""Words that are symbols wherever they stand; those with an index or an argument are, too."""
TOKEN = re.compile(
    r"``[^`]+``|\.\.\.|\.\.|->|<-|<=|>=|//|[A-Za-z]+'s\b|[A-Za-z]+(?:-[a-z]{2,})+(?![\w^(])"
    r"|(?!sum_|prod_)[A-Za-z]{2,}(?:_[A-Za-z]{2,})+(?![\w^])"
    r"|[A-Za-z][A-Za-z0-9]*|\d+(?:[.,]\d+)*|\s+|\S"
)
OPERATORS = {"=", "+", "-", "*", "/", ".", "<", ">", "<=", ">=", "->", "<-", "//"}
LETTERS = set("ijkqrst")
"""Of indices that are written together, as in ``p_ij``."""
OPEN, CLOSE = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}


def typeset(lines: Iterable[str]) -> str:
    """HTML of formulas, one line each; indented lines continue the one before."""
    rows: list[str] = []
    for line in lines:
        if rows and line.startswith("   "):
            rows[-1] += f" {line.strip()}"
        else:
            rows.append(re.sub(r" {2,}(=|<-) ", r" \1 ", line.strip()))
    shown = "\n".join(f"<p>{' '.join(map(_column, re.split(r' {2,}', row)))}</p>" for row in rows)
    return f'<div class="formulas">\n{shown}\n</div>'


def _column(text: str) -> str:
    """What stands between wide gaps, as a piece that moves to the next line as a whole where it fits there."""
    return f"<span>{''.join(_pieces(text))}</span>"


def _pieces(text: str) -> Iterator[str]:
    tokens = TOKEN.findall(text)
    prose = _prose(tokens)
    start = 0
    for index in range(1, len(tokens) + 1):
        if index == len(tokens) or prose[index] != prose[start]:
            part = tokens[start:index]
            yield escape("".join(part), quote=False) if prose[start] == 1 else _marked(part, prose[start])
            start = index


def _marked(tokens: list[str], kind: int) -> str:
    if kind == 2:
        return "".join(f"<code>{escape(token.strip('`'))}</code>" for token in tokens)
    out, start, scripts = [], 0, _scripts(tokens)
    for index in range(len(tokens) + 1):
        if index == len(tokens) or (tokens[index].isspace() and index not in scripts):
            chunk = tokens[start:index]
            out.append(f"<math>{Formula(chunk).row()}</math>" if chunk else "")
            if index < len(tokens):  # a line breaks before an operator, not behind it
                out.append("\N{NO-BREAK SPACE}" if chunk and chunk[0] in OPERATORS and len(chunk) == 1 else " ")
            start = index + 1
    return "".join(out)


def _prose(tokens: list[str]) -> list[int]:
    """Of every token: 0 in a formula, 1 in prose, 2 code. Spaces and commas belong to what stands before them."""
    scripts = _scripts(tokens)
    kinds = [
        2 if token.startswith("``") else int(index not in scripts and _is_word(tokens, index))
        for index, token in enumerate(tokens)
    ]
    words = [index for index, token in enumerate(tokens) if not token.isspace()]
    for place, index in enumerate(words):
        before = kinds[words[place - 1]] if place else 0
        after = kinds[words[place + 1]] if place + 1 < len(words) else 0
        single = kinds[index] == 1 and before != 1 and after != 1
        if single and tokens[index].islower() and tokens[index] not in ENGLISH and _operand(tokens, words, place):
            kinds[index] = 0
        if tokens[index] in (",", ";", ":", ".", "?", '"') and before:
            kinds[index] = 1
        apart = index == 0 or tokens[index - 1].isspace()
        if after == 1 and (tokens[index] == "a" or (tokens[index] == "(" and apart)):  # the article, a remark
            kinds[index] = 1
    for index, token in enumerate(tokens):
        if token.isspace() and index:
            kinds[index] = kinds[index - 1] if kinds[index - 1] != 2 else 1
    return kinds


ENGLISH = {
    "over", "of", "by", "in", "if", "is", "it", "the", "to", "where", "with", "then", "and", "an", "from", "at", "or",
    "up", "all", "else", "query", "now", "rule", "sees", "key", "halts",
}  # fmt: skip


def _scripts(tokens: list[str]) -> set[int]:
    """Which tokens stand in an index, a power or under a root."""
    inside: set[int] = set()
    for index, token in enumerate(tokens[:-1]):
        if token in ("_", "^") or (token == "sqrt" and tokens[index + 1] == "("):
            end, depth = index + 1, int(tokens[index + 1] in OPEN)
            while depth and end + 1 < len(tokens):
                end += 1
                depth += (tokens[end] in OPEN) - (tokens[end] in CLOSE)
            inside.update(range(index, end + 1))
    return inside


def _is_word(tokens: list[str], index: int) -> bool:
    token = tokens[index]
    following = tokens[index + 1] if index + 1 < len(tokens) else ""
    if token.endswith("'s"):
        return True
    if not re.fullmatch(r"[A-Za-z]{2,}(?:[_-][a-z]+)*", token) or token in GREEK or token in NAMES:
        return False
    if token in BIG:
        return following not in ("_",)
    return following not in ("_", "^", "(", "'", "[", "~")


def _operand(tokens: list[str], words: list[int], place: int) -> bool:
    around = [tokens[words[place + step]] for step in (-1, 1) if 0 <= place + step < len(words)]
    return any(token in ("*", "/", "=", "+", "<", ">", "|", "<=", ">=") for token in around)


class Formula:
    """Reads tokens and writes MathML: symbols with what stands at their feet and shoulders."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.index = tokens, 0

    def row(self, end: str = "") -> str:
        """Everything up to the token ``end`` that closes what is open, which is read, too."""
        out: list[str] = []
        depth = 0
        while (token := self._peek()) and (depth or token != end):
            depth += (token in OPEN) - (token in CLOSE)
            if token.isspace():
                self.index += 1
                following = self._peek()
                gap = out and _operates(out[-1]) is False and _starts(following)
                out += ['<mspace width="0.17em"/>'] if gap else []
            else:
                out.append(self._scripted())
        self.index += 1
        return "".join(out)

    def _peek(self, ahead: int = 0) -> str:
        return self.tokens[self.index + ahead] if self.index + ahead < len(self.tokens) else ""

    def _scripted(self) -> str:
        """One symbol, with primes, a tilde, a star, an index and a power."""
        token = self._peek()
        base = self._symbol()
        low = high = ""
        while (sign := self._peek()) in ("'", "~", "_", "^") or (sign == "*" and self._peek(1) == "_"):
            self.index += 1
            if sign == "~":
                base = f"<mover><mrow>{base}</mrow><mo>~</mo></mover>"
            elif sign == "_":
                low = self._script()
            else:
                high += self._script() if sign == "^" else "<mo>′</mo>" if sign == "'" else "<mo>∗</mo>"
        over = token in BIG
        if low and high:
            tag = "munderover" if over else "msubsup"
            return f"<{tag}><mrow>{base}</mrow><mrow>{low}</mrow><mrow>{high}</mrow></{tag}>"
        if low or high:
            tag = ("munder" if low else "mover") if over else ("msub" if low else "msup")
            return f"<{tag}><mrow>{base}</mrow><mrow>{low or high}</mrow></{tag}>"
        return base

    def _script(self) -> str:
        """An index or a power: a group without its brackets, or one symbol."""
        if self._peek() in ("(", "{"):
            end = OPEN[self._peek()]
            self.index += 1
            return self.row(end)
        if set(self._peek()) <= LETTERS and self._peek():
            self.index += 1
            return "".join(f"<mi>{letter}</mi>" for letter in self.tokens[self.index - 1])
        sign = ""
        if self._peek() == "-":
            self.index += 1
            sign = "<mo>−</mo>"
        return sign + self._symbol()

    def _symbol(self) -> str:
        token = self._peek()
        self.index += 1
        if token == "sqrt" and self._peek() == "(":
            self.index += 1
            return f"<msqrt>{self.row(')')}</msqrt>"
        if token in BIG:
            return f'<mo largeop="true">{BIG[token]}</mo>'
        if token in GREEK:
            return f"<mi>{GREEK[token]}</mi>"
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        if index := re.fullmatch(r"([A-Za-z])(\d+)", token):
            return f"<msub><mi>{index[1]}</mi><mn>{index[2]}</mn></msub>"
        if token[0].isalpha():
            return f"<mi>{token}</mi>"
        return self._operator(token)

    def _operator(self, token: str) -> str:
        before = next((each for each in reversed(self.tokens[: self.index - 1]) if not each.isspace()), "(")
        options = ""
        if token == "|":
            options = ' stretchy="false" lspace="0" rspace="0"'
        elif token in OPEN or token in CLOSE:
            options = ' stretchy="false"'
        elif token == "-" and (before in OPEN or before in (",", ";", "=", "^", "*")) and len(self.tokens) > 1:
            options = ' form="prefix"'
        elif len(self.tokens) == 1:
            options = ' lspace="0" rspace="0"'
        return f"<mo{options}>{escape(SIGNS.get(token, token))}</mo>"


def _operates(last: str) -> bool:
    """Whether what was written last is an operator, which brings its own space."""
    return (
        last.startswith("<mo") and not last.endswith((")</mo>", "]</mo>", "|</mo>")) and not last.startswith("<mover")
    )


def _starts(token: str) -> bool:
    return bool(token) and (token[0].isalnum() or token in OPEN)
