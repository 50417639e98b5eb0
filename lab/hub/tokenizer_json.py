"""Our tokenizers in Hugging Face's format: fast(tokenizer) writes a tokenizer.json."""

import tokenizers as hf
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from errors import UserError
from text.tokenizers import END, Tokenizer


def fast(tok: Tokenizer, block_size: int) -> object:
    """A PreTrainedTokenizerFast of transformers with the same ids for the same text.

    If our tokenizer has END, this is the token for the beginning and the end of a text and for
    padding. Raises UserError for a tokenizer that cannot be exported.
    """
    kind = tok.meta["kind"]
    if kind not in EXPORT:
        raise UserError(
            f"a tokenizer of kind {kind!r} cannot be exported; these can: {', '.join(EXPORT)}"
        )
    exported = EXPORT[kind](tok)
    special = {}
    if tok.eot is not None:
        exported.add_special_tokens([hf.AddedToken(END, special=True, normalized=False)])
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
    return PreTrainedTokenizerFast(
        tokenizer_object=exported,
        model_max_length=block_size,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **special,
    )


def characters(tok: Tokenizer) -> object:
    """Other characters are an error."""
    exported = hf.Tokenizer(hf.models.WordLevel({c: i for i, c in enumerate(tok.vocab)}))
    every_character = hf.Regex(r"(?m).")  # m: also a line end
    exported.pre_tokenizer = hf.pre_tokenizers.Split(every_character, "isolated")
    exported.decoder = hf.decoders.Fuse()
    return exported


def byte_pairs(vocab: dict[str, int], merges: list[tuple[str, str]], regex: bool) -> object:
    """BPE over bytes, each written as a visible character. regex: cut words by GPT-2's pattern."""
    exported = hf.Tokenizer(hf.models.BPE(vocab, merges, ignore_merges=True))
    exported.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    exported.decoder = hf.decoders.ByteLevel()
    return exported


def single_bytes(tok: Tokenizer) -> object:
    characters = bytes_to_unicode() | {255: END}  # UTF-8 has no byte 255
    vocab = {character: byte for byte, character in characters.items()}
    return byte_pairs(vocab, [], regex=False)


def gpt2(tok: Tokenizer) -> object:
    """GPT-2's byte pairs. tiktoken has ranks in the place of a list of merges.

    It joins two neighbours if the result is a token, that of lowest rank first. So each way to cut
    a token into two tokens is a merge.
    """
    ranks = tok._bpe._mergeable_ranks
    visible = bytes_to_unicode()  # {65: "A", 32: "Ġ", ...}
    names = {token: "".join(visible[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.get):
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            if left in ranks and right in ranks:
                merges.append((names[left], names[right]))
    return byte_pairs({names[token]: rank for token, rank in ranks.items()}, merges, regex=True)


def sentencepiece(tok: Tokenizer) -> object:
    """A unigram vocabulary, its normalisation, and bytes for rare characters; END is </s>.

    SentencePiece adds up scores in float32, tokenizers in float64. Where two cuts of a word have
    almost equal scores, they may choose differently (lab/hub/README.md says how often).
    """
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ModuleNotFoundError as error:
        why = "a SentencePiece vocabulary needs protobuf: pip install protobuf"
        raise UserError(f"{why} ({error})") from None

    model = sentencepiece_model_pb2.ModelProto.FromString(tok._sp.serialized_model_proto())
    if model.trainer_spec.model_type != sentencepiece_model_pb2.TrainerSpec.UNIGRAM:
        raise UserError("only SentencePiece's unigram models can be exported")
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    unknown = model.trainer_spec.unk_id
    # not <unk>: tokenizers would look for these letters in texts
    pieces[unknown] = ("<|unknown|>", 0.0)
    if tok.eot is not None:
        pieces[tok.eot] = (END, 0.0)
    exported = hf.Tokenizer(hf.models.Unigram(pieces, unk_id=unknown, byte_fallback=True))
    exported.normalizer = hf.normalizers.Sequence(
        [
            hf.normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap),
            hf.normalizers.Strip(),
            hf.normalizers.Replace(hf.Regex(" {2,}"), " "),
        ]
    )
    exported.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme="always")
    exported.decoder = hf.decoders.Sequence(
        [
            hf.decoders.ByteFallback(),
            hf.decoders.Metaspace(prepend_scheme="always"),
            hf.decoders.Fuse(),
        ]
    )
    return exported


EXPORT = {
    "char": characters,
    "bytes": single_bytes,
    "gpt2": gpt2,
    "sentencepiece": sentencepiece,
}
