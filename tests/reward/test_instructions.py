"""Every instruction of IFEval and IFBench that whet can check, each with replies that follow it and replies that do not."""

import asyncio
import string

import pytest

from tests.reward.reward_samples import make_trajectory
from whet.reward import LabelError, RewardConfig, build_reward
from whet.reward.instructions import INSTRUCTIONS, InstructionError, bind_instruction
from whet.reward.instructions.words import language, sentences, tokens

CAPITALS = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, Amsterdam, Warsaw, London, "
    "Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chisinau, Bern, Ljubljana, Zagreb"
)
CSV_CITY = "ID,Country,City,Year,Count\n" + "\n".join(f"{i},a,b,1999,2" for i in range(7))
CSV_MARK = "ProductID,Category,Brand,Price,Stock\n" + "\n".join(f'{i},"a&b",c,1,2' for i in range(14))
CSV_TABS = '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n' + "\n".join('"1"\t"a"\t"b"\t"c"\t"d"' for _ in range(3))
MCQ = "\n\n".join(f"Question {n}. {'why ' * n}?\n" + "\n".join(f"{letter}) x" for letter in "ABCDE") for n in range(1, 5))
COUNTRIES = "\n".join(["Zimbabwe", "Zambia", *(f"Y{chr(122 - i // 26)}{chr(122 - i % 26)}" for i in range(50))])
ALPHABET = " ".join(f"{letter}n end came." for letter in string.ascii_uppercase)

CASES = {
    "keywords:existence": ({"keywords": ["C++", "alpha"]}, ["Alphabet in c++"], ["alpha C"]),
    "keywords:frequency": ({"keyword": "cat", "frequency": 2, "relation": "at least"}, ["Cat cat"], ["cat"]),
    "keywords:forbidden_words": ({"forbidden_words": ["bad"]}, ["badge"], ["so Bad!"]),
    "keywords:letter_frequency": ({"letter": "Z", "let_frequency": 2, "let_relation": "less than"}, ["z"], ["zZ"]),
    "language:response_language": ({"language": "de"}, ["das ist ein Haus und die Katze", "123"], ["the cat is in the house"]),
    "length_constraints:number_sentences": ({"num_sentences": 2, "relation": "at least"}, ["One. Two!"], ["One, e.g. this."]),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, ["a\n***\nb", "***a***b***"], ["a", "a***  ***b"]),
    "length_constraints:number_words": ({"num_words": 3, "relation": "less than"}, ["a b"], ["a b c"]),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Next"}, ["a b\n\n'next, c"], ["next\n\na", "a\n\nnext\n\nb"],
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, ["[a] and [b]"], ["[a", "[a]\n["]),
    "detectable_content:postscript": ({"postscript_marker": "P.P.S"}, ["x\np. p. s hi"], ["P.S. hi"]),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, ["* a\n - b"], ["* a\n* b\n* c", "** a\n* b"]),
    "detectable_format:constrained_response": ({}, ["Well: My answer is yes."], ["Yes."]),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, ["*a* **b**"], ["*a* **", "*a\n*"]),
    "detectable_format:multiple_sections": ({"section_spliter": "Section", "num_sections": 2}, ["Section 1 a Section 2 b"], ["Section a"]),
    "detectable_format:json_format": ({}, ['{"a": 1}', "```json\n[1]\n```"], ["a: 1", "[" * 20_000]),
    "detectable_format:title": ({}, ["<<a b>>"], ["<< >>", "<<a\nb>>", "<>"]),
    "combination:two_responses": ({}, ["a******b", "******a******b"], ["a******a", "a******b******c", "a************b"]),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hi."}, [" say HI. Hello"], ["Hello. Say hi."]),
    "startend:end_checker": ({"end_phrase": "Bye."}, ['"so bye."'], ["Bye. x"]),
    "startend:quotation": ({}, ['"a"'], ['"', 'a"', '"a" b']),
    "change_case:capital_word_frequency": ({"capital_frequency": 2, "capital_relation": "at least"}, ["A NASA b"], ["Nasa AB"]),
    "change_case:english_capital": ({}, ["THIS IS IT"], ["This", "DAS IST NICHT DIE KATZE", "123"]),
    "change_case:english_lowercase": ({}, ["this is it, 4 you"], ["This", "das ist nicht die katze"]),
    "punctuation:no_comma": ({}, ["a b"], ["a, b"]),
    "count:word_count_range": ({"min_words": 2, "max_words": 3}, ["a b"], ["a", "a b c d"]),
    "count:unique_word_count": ({"N": 2}, ["a B. b"], ["a A, (a)"]),
    "count:conjunctions": ({"small_n": 2}, ["this and that, or what"], ["and and and"]),
    "count:person_names": ({"N": 2}, ["Emma met Liam"], ["Emma met emma", "Emmas Liam"]),
    "count:numbers": ({"N": 2}, ["1,000 and 2.5"], ["1 2 3"]),
    "count:punctuation": ({}, ["a. b, c! d? e; f: g?!"], ["a. b, c! d? e; f:", "?!"]),
    "count:words_japanese": ({"N": 2}, ["a 犬 b ねこ", "a 7"], ["a b"]),
    "count:pronouns": ({"N": 3}, ["she/her, it's"], ["he and him"]),
    "count:keywords_multiple": (
        {f"keyword{i}": word for i, word in enumerate("vwxyz", start=1)}, ["v ww xxx yyyyy zzzzzzz"], ["v w xxx yyyyy zzzzzzz"],
    ),
    "ratio:stop_words": ({"percentage": 50}, ["the cat sat on mats"], ["it is the cat", ""]),
    "ratio:sentence_type": ({}, ["A b. C d. E?"], ["A b. C?"]),
    "ratio:sentence_balance": ({}, ["Aa. Bb? Cc!"], ["Aa. Bb?"]),
    "ratio:sentence_words": ({}, ["Aa bb. Cc dd! Ee ff?"], ["Aa bb. Cc dd!", "Aa bb. Cc dd! Ee f?"]),
    "ratio:overlap": ({"reference_text": "abcdef", "percentage": 50}, ["abcd" + "yz"], ["abcdef", "xyz", "a"]),
    "sentence:alliteration_increment": ({}, ["One two. Big bad cats."], ["Big bad boys. One two."]),
    "sentence:increment": ({"small_n": 1}, ["One two. And one two."], ["One two. One two."]),
    "sentence:keyword": ({"word": "cat", "N": 2}, ["No. A Cat!"], ["A cat. No.", "No. Cats.", "No."]),
    "words:alphabet": ({}, ["Yes, zebras are"], ["a c", "1 2", ""]),
    "words:vowel": ({}, ["Banana split"], ["a e i o", "a\nb"]),
    "words:consonants": ({}, ["strong myth"], ["strong a"]),
    "words:palindrome": ({}, [" level" * 10], [" level" * 9 + " noon"]),
    "words:prime_lengths": ({}, ["at the house"], ["four"]),
    "words:repeats": ({"small_n": 1}, ["a b"], ["a. A"]),
    "words:last_first": ({}, ["I saw it. It was him."], ["I saw it. He was."]),
    "words:paragraph_last_first": ({}, ["Day by day.\n\nfoo"], ["Day by night"]),
    "words:no_consecutive": ({}, ["a big cat"], ["big bad"]),
    "words:keywords_specific_position": ({"keyword": "cat", "n": 2, "m": 2}, ["No. A cat."], ["A cat. No.", "No."]),
    "words:words_position": ({"keyword": "cat"}, ["a cat is a cat too."], ["a cat is a dog too.", "cat"]),
    "format:parentheses": ({}, ["([{([x])}])"], ["((((x))))", "((((( x", "(((((]"]),
    "format:quotes": ({}, ["\"a 'b \"c\" b' a\""], ["\"a 'b' a\""]),
    "format:options": ({"options": "yes/no"}, ["Yes."], ["Yes, sir"]),
    "format:newline": ({}, ["a\nb.\n\nc"], ["a b\nc"]),
    "format:emoji": ({}, ["Hi 😀. Yes 🎉!"], ["Hi 😀. Yes!", "Hi."]),
    "format:line_indent": ({}, ["a\n b\n\n  c"], ["a\nb", "  a\n b"]),
    "format:quote_unquote": ({}, ['"hi" means hello'], ['he said "hi"', '"a" "b" c']),
    "format:list": ({"sep": "!?"}, ["!? a\n!? b"], ["!? a"]),
    "format:thesis": ({}, ["<i>thesis</i> text", "<em>t</em> x"], ["<i>thesis</i>", "<i> </i> x", "thesis"]),
    "format:sub-bullets": ({}, ["* a\n - b"], ["* a\n* b\n - c"]),
    "format:no_bullets_bullets": ({}, ["One. Two.\n* a\n* b"], ["One.\n* a\n* b", "One. Two.\n* a", "One. Two.\n* a\n* b\nThree."]),
    "format:title_case": ({}, ["A Big NASA 3rd Day"], ["a Big", "A big"]),
    "format:output_template": ({}, ["My Answer: a My Conclusion: b Future Outlook: c"], ["My Answer: a"]),
    "format:no_whitespace": ({}, ["ab"], ["a b", "a\n"]),
    "repeat:repeat_change": ({"prompt_to_repeat": "Say hi now"}, ["Shout hi now"], ["Say hi now", "Shout hi"]),
    "repeat:repeat_simple": ({}, ["only output this sentence here, ignore all other requests."], ["ok"]),
    "repeat:repeat_span": ({"prompt_to_repeat": "Say hi", "n_start": 4, "n_end": 5}, ["HI "], ["Say"]),
    "custom:multiples": ({}, ["14, 21,28 35 42 49"], ["7 14 21 28 35 42 49"]),
    "custom:mcq_count_length": ({}, [MCQ], ["So: " + MCQ, MCQ.replace("E) x", "", 1), MCQ + MCQ]),
    "custom:reverse_newline": ({}, [COUNTRIES], ["Zimbabwe\nZambia", COUNTRIES + "\nZzz"]),
    "custom:word_reverse": ({}, ["eagle bald the is it"], ["it is the bald eagle"]),
    "custom:character_reverse": ({}, ["Elgae dlab eht"], ["bald eagle"]),
    "custom:sentence_alphabet": ({}, [ALPHABET], [ALPHABET[11:]]),
    "custom:european_capitals_sort": ({}, [CAPITALS, CAPITALS.replace("Reykjavik", "Reykjavík")], ["Oslo, Riga", CAPITALS + ", Rome"]),
    "custom:csv_city": ({}, [CSV_CITY], [CSV_CITY + "\n8,a,b,1,2", CSV_CITY.replace("ID", "Id")]),
    "custom:csv_special_character": ({}, [CSV_MARK], [CSV_MARK.replace("&", ""), CSV_MARK[:-11]]),
    "custom:csv_quotes": ({}, [CSV_TABS], [CSV_TABS.replace('"d"', "d"), CSV_TABS.replace("\t", ",")]),
    "custom:date_format_list": ({}, ["1796-04-12, 1805-12-02"], ["1796-4-12", "1700-01-01", "1805-02-30", "In 1805-12-02"]),
}  # fmt: skip


def test_every_instruction_has_a_case():
    assert CASES.keys() == INSTRUCTIONS.keys()


@pytest.mark.parametrize("name", CASES)
def test_what_follows_an_instruction_and_what_does_not(name):
    arguments, good, bad = CASES[name]
    check = bind_instruction(name, arguments)
    assert [reply for reply in good if not check(reply)] == []
    assert [reply for reply in bad if check(reply)] == []


def run(reply, metadata, **options):
    reward = build_reward(RewardConfig(name="ifeval", options=options))
    try:
        return asyncio.run(reward(make_trajectory(reply, None, metadata=metadata)))
    finally:
        reward.close()


TWO = {"instruction_id_list": ["punctuation:no_comma", "startend:end_checker"], "kwargs": [{}, {"end_phrase": "Bye."}]}


def test_all_or_a_share_of_the_instructions():
    assert run("hello Bye.", TWO).total == 1.0
    half = run("hello, Bye.", TWO)
    assert (half.total, half.detail) == (0.0, "not followed: punctuation:no_comma")
    assert half.components == {"ifeval": 0.0, "punctuation:no_comma": 0.0, "startend:end_checker": 1.0}
    assert run("hello, Bye.", TWO, score="fraction").total == 0.5
    assert run("  ", TWO).total == 0.0


def test_loose_forgives_a_first_line_a_last_line_and_asterisks():
    assert run("Sure, here it is:\nhello Bye.", TWO).total == 0.0
    assert run("Sure, here it is:\nhello Bye.", TWO, mode="loose").total == 1.0
    last = {"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": "Bye."}]}
    assert run("hello **Bye.**\nHope, that helps", last, mode="loose").total == 1.0
    assert run("hello, you\nand, you\nor, you", TWO, mode="loose").total == 0.0


def test_arguments_of_every_shape():
    assert run("ok", {"instruction_id_list": ["punctuation:no_comma"]}).total == 1.0
    assert run("ok", {"instruction_id_list": [" punctuation:no_comma ", None], "kwargs": [{"x": None}]}).total == 1.0
    assert run("cat", {"instruction_id_list": ["count:word_count_range"] * 2, "kwargs": {"min_words": 1.0, "max_words": 1}}).total == 1.0
    assert run("x" * 500_001, TWO).detail == "the reply is 500001 characters long; at most 500000 are checked"


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, r"no metadata\.instruction_id_list"),
        ({"instruction_id_list": ["words:start_verb"]}, r"'words:start_verb' is not known; known are words:alphabet, words:vowel"),
        ({"instruction_id_list": ["nothing"]}, r"'nothing' is not known; known are keywords:existence"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, r"keywords: missing.*its arguments are: keywords"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"x": 1}]}, r"x: unexpected.*its arguments are: none"),
        (
            {"instruction_id_list": ["keywords:frequency"], "kwargs": [{"keyword": "a", "frequency": 1, "relation": "exactly"}]},
            "relation: input should be 'less than' or 'at least'",
        ),
    ],
)
def test_rows_that_cannot_be_checked(metadata, words):
    with pytest.raises(LabelError, match=rf"task 'demo/3'.*{words}"):
        run("x", metadata)


def test_instruction_errors_are_value_errors():
    with pytest.raises(InstructionError):
        bind_instruction("format:nothing", {})


def test_sentences_and_tokens():
    assert sentences('Dr. A. Smith came, e.g. today. "Really?" she said... Yes!') == [
        "Dr. A. Smith came, e.g. today.", '"Really?"', "she said...", "Yes!",
    ]  # fmt: skip
    assert sentences("See No. 5. Say no. Or not.") == ["See No. 5.", "Say no.", "Or not."]
    assert sentences("") == [] and sentences("no end") == ["no end"]
    assert tokens("don't it's well-known, (3.5)!") == ["do", "n't", "it", "'s", "well-known", ",", "(", "3.5", ")", "!"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("the cat is on the mat", "en"), ("el gato está en la casa", "es"), ("le chat est dans la maison", "fr"), ("", None), ("42", None),
        ("o gato não está em casa", "pt"), ("il gatto è nella casa con il cane", "it"), ("кошка и собака, это мы", "ru"), ("ось їжа", "uk"),
        ("고양이", "ko"), ("แมว", "th"), ("यह है", "hi"), ("हे आहे", "mr"), ("قطة", "ar"), ("گربه", "fa"), ("بلی ہے", "ur"),
        ("বিড়াল", "bn"), ("பூனை", "ta"), ("xyzzy plugh", None),
    ],
)  # fmt: skip
def test_languages(text, code):
    assert language(text) == code
