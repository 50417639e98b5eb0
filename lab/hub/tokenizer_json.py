"""Our tokenizers as Hugging Face's: fast(tokenizer) becomes a tokenizer.json, which every program of theirs reads."""

from types import ModuleType

from errors import UserError, optional
from text.tokenizers import END, Tokenizer


def fast(tok: Tokenizer, block_size: int) -> object:
    """A PreTrainedTokenizerFast of transformers with the same ids for the same text. UserError for other kinds.

    END is its token for the beginning and the end of a text and for padding, if our tokenizer has one.
    """
    hf = optional("tokenizers", "tokenizer.json")
    kind = tok.meta["kind"]
    if kind not in KINDS:
        raise UserError(f"a tokenizer of kind {kind!r} cannot be exported; these can: {', '.join(KINDS)}")
    theirs = KINDS[kind](hf, tok)
    special = {}
    if tok.eot is not None:
        theirs.add_special_tokens([hf.AddedToken(END, special=True, normalized=False)])
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
    n = theirs.get_vocab_size()
    if n != tok.n_vocab or (special and theirs.token_to_id(END) != tok.eot):
        raise UserError(f"the tokenizer has {tok.n_vocab} tokens, but its tokenizer.json would have {n}")
    transformers = optional("transformers", "tokenizer.json")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=theirs, model_max_length=block_size, padding_side="left",
        clean_up_tokenization_spaces=False, **special,
    )  # fmt: skip


def of_characters(hf: ModuleType, tok: Tokenizer) -> object:
    theirs = hf.Tokenizer(hf.models.WordLevel({c: i for i, c in enumerate(tok.vocab)}))  # other characters: an error
    theirs.pre_tokenizer = hf.pre_tokenizers.Split(hf.Regex(r"(?m)."), "isolated")  # m: . is a line end too
    theirs.decoder = hf.decoders.Fuse()
    return theirs


def byte_pairs(hf: ModuleType, vocab: dict[str, int], merges: list[tuple[str, str]], regex: bool) -> object:
    """BPE over bytes, each written as one visible character. regex: words are cut by GPT-2's pattern first."""
    theirs = hf.Tokenizer(hf.models.BPE(vocab, merges, ignore_merges=True))
    theirs.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    theirs.decoder = hf.decoders.ByteLevel()
    return theirs


def of_bytes(hf: ModuleType, tok: Tokenizer) -> object:
    """The byte 255 never occurs in UTF-8: its id is END's."""
    return byte_pairs(hf, {c: b for b, c in visible_bytes().items() if b < 255} | {END: 255}, [], regex=False)


def of_gpt2(hf: ModuleType, tok: Tokenizer) -> object:
    """tiktoken joins two neighbours if the result is a token, the one of lowest rank first, however it is cut."""
    ranks, visible = tok._bpe._mergeable_ranks, visible_bytes()

    def name(token: bytes) -> str:
        return "".join(visible[b] for b in token)

    cuts = [(token[:i], token[i:]) for token in sorted(ranks, key=ranks.get) for i in range(1, len(token))]
    merges = [(name(a), name(b)) for a, b in cuts if a in ranks and b in ranks]
    return byte_pairs(hf, {name(token): rank for token, rank in ranks.items()}, merges, regex=True)


def visible_bytes() -> dict[int, str]:
    """A visible character for each byte, as in GPT-2: {65: "A", 32: "Ġ"}."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


def of_sentencepiece(hf: ModuleType, tok: Tokenizer) -> object:
    """A unigram vocabulary, its normalisation, and bytes for rare characters. END is the piece </s>.

    SentencePiece adds up scores in float32, tokenizers in float64: where two cuts of a word have almost equal scores,
    they may choose differently (lab/hub/README.md has how often).
    """
    optional("google.protobuf", "the file of a SentencePiece model")
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(tok._sp.serialized_model_proto())
    unigram = sentencepiece_model_pb2.TrainerSpec.UNIGRAM
    if model.trainer_spec.model_type != unigram:
        raise UserError("only SentencePiece's unigram models can be exported")
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    unknown = model.trainer_spec.unk_id
    pieces[unknown] = ("<|unknown|>", 0.0)  # not <unk>: tokenizers would find it where a text has these letters
    if tok.eot is not None:
        pieces[tok.eot] = (END, 0.0)
    theirs = hf.Tokenizer(hf.models.Unigram(pieces, unk_id=unknown, byte_fallback=True))
    steps = [hf.normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)]
    steps += [hf.normalizers.Strip(), hf.normalizers.Replace(hf.Regex(" {2,}"), " ")]
    theirs.normalizer = hf.normalizers.Sequence(steps)
    theirs.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme="always")
    parts = [hf.decoders.ByteFallback(), hf.decoders.Metaspace(prepend_scheme="always"), hf.decoders.Fuse()]
    theirs.decoder = hf.decoders.Sequence(parts)
    return theirs


KINDS = {"char": of_characters, "bytes": of_bytes, "gpt2": of_gpt2, "sentencepiece": of_sentencepiece}
