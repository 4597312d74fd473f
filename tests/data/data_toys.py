"""A tokenizer for tests: one id a character."""

from phylon.data import Texts, tokenise


class Characters:
    """Ids in the order of first appearance in the alphabet; the end token, if any, is the last id."""

    def __init__(self, alphabet="abcdefghijklmnopqrstuvwxyz", end=True, vocab_size=None):
        self.ids = {character: index for index, character in enumerate(dict.fromkeys(alphabet))}
        self.eos_ids = (len(self.ids),) if end else ()
        self.bos_id = None
        self.vocab_size = vocab_size or len(self.ids) + len(self.eos_ids)
        self.calls = 0

    def encode_batch(self, texts, *, special):
        assert special is False
        self.calls += 1
        return [[self.ids[character] for character in text] for text in texts]

    def fingerprint(self):
        return f"characters {self.ids} {self.eos_ids}"


def store_of(lengths, cache_dir=None):
    """A store whose documents have these lengths, the end token included."""
    texts = tuple("abcdefghij"[index % 10] * (length - 1) for index, length in enumerate(lengths))
    return tokenise(Texts(texts), Characters(), cache_dir)
