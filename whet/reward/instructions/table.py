"""Every instruction that whet can check, by the id that IFEval and IFBench give it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from pydantic import ConfigDict, ValidationError, validate_call

from whet.reward.instructions import ifbench_format as form
from whet.reward.instructions import ifbench_words as words
from whet.reward.instructions import ifeval
from whet.types import JSON

Instruction = Callable[..., bool]
"""Check of a reply against an instruction: `check(reply, **arguments)`."""


class InstructionError(ValueError):
    """There is no such instruction, or it does not take these arguments."""


INSTRUCTIONS: dict[str, Instruction] = {
    "keywords:existence": ifeval.keywords_exist,
    "keywords:frequency": ifeval.keyword_frequency,
    "keywords:forbidden_words": ifeval.forbidden_words,
    "keywords:letter_frequency": ifeval.letter_frequency,
    "language:response_language": ifeval.response_language,
    "length_constraints:number_sentences": ifeval.number_sentences,
    "length_constraints:number_paragraphs": ifeval.number_paragraphs,
    "length_constraints:number_words": ifeval.number_words,
    "length_constraints:nth_paragraph_first_word": ifeval.nth_paragraph_first_word,
    "detectable_content:number_placeholders": ifeval.number_placeholders,
    "detectable_content:postscript": ifeval.postscript,
    "detectable_format:number_bullet_lists": ifeval.number_bullet_lists,
    "detectable_format:constrained_response": ifeval.constrained_response,
    "detectable_format:number_highlighted_sections": ifeval.number_highlighted_sections,
    "detectable_format:multiple_sections": ifeval.multiple_sections,
    "detectable_format:json_format": ifeval.json_format,
    "detectable_format:title": ifeval.title,
    "combination:two_responses": ifeval.two_responses,
    "combination:repeat_prompt": ifeval.repeat_prompt,
    "startend:end_checker": ifeval.end_checker,
    "startend:quotation": ifeval.quotation,
    "change_case:capital_word_frequency": ifeval.capital_word_frequency,
    "change_case:english_capital": ifeval.english_capital,
    "change_case:english_lowercase": ifeval.english_lowercase,
    "punctuation:no_comma": ifeval.no_comma,
    "count:word_count_range": words.word_count_range,
    "count:unique_word_count": words.unique_word_count,
    "count:conjunctions": words.conjunctions,
    "count:person_names": words.person_names,
    "count:numbers": words.numbers,
    "count:punctuation": words.punctuation,
    "count:words_japanese": words.words_japanese,
    "count:pronouns": words.pronouns,
    "count:keywords_multiple": words.keywords_multiple,
    "ratio:stop_words": words.stop_words,
    "ratio:sentence_type": words.sentence_type,
    "ratio:sentence_balance": words.sentence_balance,
    "ratio:sentence_words": words.sentence_words,
    "ratio:overlap": words.overlap,
    "sentence:alliteration_increment": words.alliteration_increment,
    "sentence:increment": words.sentence_increment,
    "sentence:keyword": words.sentence_keyword,
    "words:alphabet": words.alphabet,
    "words:vowel": words.vowel,
    "words:consonants": words.consonants,
    "words:palindrome": words.palindrome,
    "words:prime_lengths": words.prime_lengths,
    "words:repeats": words.repeats,
    "words:last_first": words.last_first,
    "words:paragraph_last_first": words.paragraph_last_first,
    "words:no_consecutive": words.no_consecutive,
    "words:keywords_specific_position": words.keywords_specific_position,
    "words:words_position": words.words_position,
    "format:parentheses": form.parentheses,
    "format:quotes": form.quotes,
    "format:options": form.options,
    "format:newline": form.newline,
    "format:emoji": form.emoji,
    "format:line_indent": form.line_indent,
    "format:quote_unquote": form.quote_unquote,
    "format:list": form.marked_list,
    "format:thesis": form.thesis,
    "format:sub-bullets": form.sub_bullets,
    "format:no_bullets_bullets": form.sentences_then_bullets,
    "format:title_case": form.title_case,
    "format:output_template": form.output_template,
    "format:no_whitespace": form.no_whitespace,
    "repeat:repeat_change": form.repeat_change,
    "repeat:repeat_simple": form.repeat_simple,
    "repeat:repeat_span": form.repeat_span,
    "custom:multiples": form.multiples,
    "custom:mcq_count_length": form.mcq_count_length,
    "custom:reverse_newline": form.reverse_newline,
    "custom:word_reverse": form.word_reverse,
    "custom:character_reverse": form.character_reverse,
    "custom:sentence_alphabet": form.sentence_alphabet,
    "custom:european_capitals_sort": form.european_capitals_sort,
    "custom:csv_city": form.csv_city,
    "custom:csv_special_character": form.csv_special_character,
    "custom:csv_quotes": form.csv_quotes,
    "custom:date_format_list": form.date_format_list,
}
"""IFBench's `words:start_verb` and `words:odd_even_syllables` are not here: they need a tagger and a pronouncing dictionary."""

_VALIDATED = {name: validate_call(config=ConfigDict(coerce_numbers_to_str=True))(check) for name, check in INSTRUCTIONS.items()}


def bind_instruction(name: str, arguments: Mapping[str, JSON]) -> Callable[[str], bool]:
    """An instruction with its arguments, ready to check replies. Arguments that are null are left out.

    Raises:
        InstructionError: there is no such instruction, or these are not its arguments; the text says which it knows.
    """
    if name not in _VALIDATED:
        family = [known for known in INSTRUCTIONS if known.partition(":")[0] == name.partition(":")[0]]
        raise InstructionError(f"the instruction {name!r} is not known; known are {', '.join(family or INSTRUCTIONS)}")
    given = {key: value for key, value in arguments.items() if value is not None}
    try:
        _VALIDATED[name]("", **given)
    except ValidationError as error:
        faults = "; ".join(f"{fault['loc'][-1]}: {fault['msg'].lower()}" for fault in error.errors())
        takes = ", ".join(list(inspect.signature(INSTRUCTIONS[name]).parameters)[1:]) or "none"
        raise InstructionError(f"the instruction {name!r} cannot be used with {given!r} ({faults}); its arguments are: {takes}") from None
    return lambda reply: _VALIDATED[name](reply, **given)
