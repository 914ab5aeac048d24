"""An input that is nothing but the table that a tied head reads."""

from kinformer.core.parts import Input


class Table(Input):
    def __init__(self, weight=None, vocab_size=None):
        super().__init__()
        self.weight, self.vocab_size = weight, vocab_size

    @property
    def table(self):
        return self.weight
