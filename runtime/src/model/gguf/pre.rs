//! Pre-tokenisation rules by the name that a GGUF file gives (`tokenizer.ggml.pre`).
//!
//! Names and rules are llama.cpp's. They equal the rules of the models' own `tokenizer.json`, except where
//! llama.cpp does not distinguish case outside of ASCII (`gpt-4o`, `tekken` and similar), leaves marks out of
//! words, and does not normalise text: a file is divided as llama.cpp divides it.

/// The rules of a vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PreTokenizer {
    /// Expressions, each of which divides the pieces of the previous ones: both matches and the text between
    /// matches become pieces.
    pub(super) expressions: &'static [&'static str],
    /// Whether a whole piece that is a token is taken before any merge.
    pub(super) ignores_merges: bool,
    /// Whether prompts begin with bos where the file does not specify it.
    pub(super) adds_bos: bool,
    /// Whether tokens are spelled with bytes as printable characters (GPT-2). In others U+2581 is a space,
    /// and bytes without a token are written `<0xNN>`.
    pub(super) byte_level: bool,
}

/// Contractions of English in both cases.
macro_rules! contractions {
    () => {
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    };
}

/// White space: up to the last end of a line, up to the character before a word, and any.
macro_rules! spaces {
    () => {
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    };
}

/// Contractions, words with a character before them, digits as given, other signs with line ends.
macro_rules! words {
    ($word:literal, $digits:literal) => {
        concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?",
            $word,
            "|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
            spaces!()
        )
    };
}

/// Words by case of ASCII letters, digits as given, and other signs with line ends and slashes.
macro_rules! cased {
    ($letters:literal, $tail:expr, $digits:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[",
            $letters,
            r"&&[^a-z]]*[",
            $letters,
            r"&&[^A-Z]]+",
            $tail,
            r"|[^\r\n\p{L}\p{N}]?[",
            $letters,
            r"&&[^a-z]]+[",
            $letters,
            r"&&[^A-Z]]*",
            $tail,
            "|",
            $digits,
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*",
            spaces!()
        )
    };
}

/// Words with signs of ASCII before them, and signs.
macro_rules! signed_words {
    ($signs:literal, $ends:literal) => {
        concat!(
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
            $signs,
            $ends,
            r"|\s+(?!\S)|\s+"
        )
    };
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const LLAMA3: &str = words!(r"\p{L}+", r"\p{N}{1,3}");
const QWEN2: &str = words!(r"\p{L}+", r"\p{N}");
const DIGIT: &str = r"\p{N}";
const DIGITS_OF_THREE: &str = r"\p{N}{1,3}";
/// Digits in threes from the last one on, the first of them with what is before it.
const DIGITS_FROM_THE_END: &str = r"(?:^|(?<=\p{N}))[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))";
const LINE_ENDS: &str = r"[\r\n]";
const LINES: &str = r"[^\n]+|[\n]+";
const CJK: &str = "[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+";
const HAN_AND_HANGUL: &str = "[\u{4E00}-\u{9FA5}\u{800}-\u{4E00}\u{AC00}-\u{D7FF}]+";
const DEEPSEEK3: &str = signed_words!(r"| ?[\p{P}\p{S}]+[\r\n]*", r"|\s*[\r\n]+");
/// Runs of anything but white space and marks of a sentence (BLOOM).
const BLOOM: &str = " ?[^(\\s|.,!?\u{2026}\u{3002}\u{FF0C}\u{3001}\u{964}\u{6D4}\u{60C})]+";

/// Letters with case, as the vocabulary of DeepSeek LLM lists them.
const CASED: &str = concat!(
    "\\s?[",
    "A-Za-z\u{B5}\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{1BA}\u{1BC}-\u{1BF}\u{1C4}-\u{293}",
    "\u{295}-\u{2AF}\u{370}-\u{373}\u{376}\u{377}\u{37B}-\u{37D}\u{37F}\u{386}\u{388}-\u{38A}",
    "\u{38C}\u{38E}-\u{3A1}\u{3A3}-\u{3F5}\u{3F7}-\u{481}\u{48A}-\u{52F}\u{531}-\u{556}",
    "\u{10A0}-\u{10C5}\u{13A0}-\u{13F5}\u{13F8}-\u{13FD}\u{1C90}-\u{1CBA}\u{1CBD}-\u{1CBF}",
    "\u{1D00}-\u{1D2B}\u{1D6B}-\u{1D77}\u{1D79}-\u{1D9A}\u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}",
    "\u{1F20}-\u{1F45}\u{1F48}-\u{1F4D}\u{1F50}-\u{1F57}\u{1F59}\u{1F5B}\u{1F5D}",
    "\u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}\u{1FB6}-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}",
    "\u{1FC6}-\u{1FCC}\u{1FD0}-\u{1FD3}\u{1FD6}-\u{1FDB}\u{1FE0}-\u{1FEC}\u{1FF2}-\u{1FF4}",
    "\u{1FF6}-\u{1FFC}\u{2102}\u{2107}\u{210A}-\u{2113}\u{2115}\u{2119}-\u{211D}\u{2124}",
    "\u{2126}\u{2128}\u{212A}-\u{212D}\u{212F}-\u{2134}\u{2139}\u{213C}-\u{213F}",
    "\u{2145}-\u{2149}\u{214E}\u{2183}\u{2184}\u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}",
    "\u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}\u{A640}-\u{A66D}\u{A680}-\u{A69B}\u{A722}-\u{A76F}",
    "\u{A771}-\u{A787}\u{A78B}-\u{A78E}\u{AB70}-\u{ABBF}\u{FB00}-\u{FB06}\u{FB13}-\u{FB17}",
    "\u{FF21}-\u{FF3A}\u{FF41}-\u{FF5A}\u{10400}-\u{1044F}\u{104B0}-\u{104D3}",
    "\u{104D8}-\u{104FB}\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}\u{118A0}-\u{118DF}",
    "\u{1E900}-\u{1E943}",
    "]+"
);

const PLAIN: PreTokenizer =
    PreTokenizer { expressions: &[GPT2], ignores_merges: false, adds_bos: false, byte_level: true };

const fn plain(expressions: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer { expressions, ..PLAIN }
}

const fn whole(expressions: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer { expressions, ignores_merges: true, ..PLAIN }
}

/// The rules of each name.
const ALL: [(&[&str], PreTokenizer); 33] = [
    (
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v2-es",
            "jina-v2-de",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
            "exaone4",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
        ],
        PLAIN,
    ),
    (
        &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        PreTokenizer { adds_bos: true, ..whole(&[LLAMA3]) },
    ),
    (&["dbrx", "smaug-bpe", "chatglm-bpe"], plain(&[LLAMA3])),
    (&["glm4", "glm5"], whole(&[LLAMA3])),
    (
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        plain(&[QWEN2]),
    ),
    (
        &["qwen35"],
        plain(&[concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
            spaces!()
        )]),
    ),
    (
        &["starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"],
        plain(&[DIGIT, GPT2]),
    ),
    (&["default"], plain(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"])),
    (&["falcon"], plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"])),
    (
        &["jais-2"],
        plain(&[concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
            r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)",
            r"|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
        )]),
    ),
    (
        &["deepseek-llm"],
        plain(&[
            LINE_ENDS,
            CASED,
            "\\s?[!-/:-~\u{FF01}-\u{FF0F}\u{FF1A}-\u{FF5E}\u{2018}-\u{201F}\u{3000}-\u{3002}]+",
            r"\s+$",
            HAN_AND_HANGUL,
            r"\p{N}+",
        ]),
    ),
    (&["deepseek-coder"], plain(&[LINE_ENDS, r"\s?\p{L}+", r"\s?\p{P}+", HAN_AND_HANGUL, DIGIT])),
    (&["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"], plain(&[DIGITS_OF_THREE, CJK, DEEPSEEK3])),
    (&["spark2_5"], plain(&[DIGITS_OF_THREE, CJK, signed_words!(r"| ?[\p{P}\p{S}]+", r"|[\r\n]"), DIGIT])),
    (
        &["youtu"],
        whole(&[
            concat!(
                "[\u{AC00}-\u{D7A3}\u{3131}-\u{318E}]+|[\u{FF01}\u{2026}\u{201C}\u{201D}\u{2018}\u{2019}\u{2014}",
                "\u{FF1A}\u{FF1B}\u{FF0C}\u{3001}-\u{303F}\u{FE30}-\u{FE4F}]+|[\u{3105}-\u{312F}]+",
                "|[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+"
            ),
            concat!(
                r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                contractions!(),
                r"?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*",
                spaces!()
            ),
        ]),
    ),
    (&["poro-chat", "bloom", "gpt3-finnish"], plain(&[BLOOM])),
    (&["viking"], plain(&[BLOOM, DIGIT])),
    (&["tekken"], PreTokenizer { adds_bos: true, ..whole(&[cased!(r"\p{L}", "", r"\p{N}")]) }),
    (
        &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        plain(&[cased!(r"\p{L}", concat!(contractions!(), "?"), r"\p{N}{1,3}")]),
    ),
    (
        &["granite-embed-multi-97m"],
        whole(&[cased!(r"\p{L}\p{M}", concat!(contractions!(), "?"), r"\p{N}{1,3}")]),
    ),
    (
        &["tiny_aya", "cohere2moe"],
        plain(&[
            DIGITS_FROM_THE_END,
            concat!(
                r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                contractions!(),
                r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*",
                spaces!()
            ),
        ]),
    ),
    (
        &["chameleon"],
        PreTokenizer {
            adds_bos: true,
            ..plain(&[
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                DIGIT,
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT2,
            ])
        },
    ),
    (
        &["kimi-k2"],
        plain(&[concat!(
            r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{L}&&[^\p{Han}]]+",
            contractions!(),
            "?",
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
            spaces!()
        )]),
    ),
    (&["superbpe"], plain(&[r"\p{N}+", "[0-9]{1,3}(?=(?:[0-9]{3})*(?![0-9]))"])),
    (
        &["bailingmoe", "bailingmoe2", "llada-moe"],
        plain(&[concat!(
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
        )]),
    ),
    (
        &["seed-coder"],
        plain(&[concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+",
            spaces!()
        )]),
    ),
    (
        &["ufakzeka"],
        plain(&[concat!(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*", spaces!())]),
    ),
    (
        &["afmoe"],
        plain(&[
            DIGITS_FROM_THE_END,
            concat!(
                "[\u{4E00}-\u{9FFF}\u{3400}-\u{4DBF}\u{8C48}-\u{FAFF}\u{3040}-\u{309F}\u{30A0}-\u{30FF}",
                "\u{FF65}-\u{FF9F}\u{2F00}-\u{2FDF}\u{E40}-\u{E7F}\u{E80}-\u{EFF}\u{1780}-\u{17FF}",
                "\u{1000}-\u{109F}\u{AA60}-\u{AA7F}\u{A9E0}-\u{A9FF}\u{AC00}-\u{D7AF}\u{1100}-\u{11FF}]+"
            ),
            DEEPSEEK3,
        ]),
    ),
    (&["laguna"], plain(&[LINES, QWEN2])),
    (
        &["exaone-moe"],
        plain(&[concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?",
            r"|\s*[\r\n]|\s+(?!\S)|\s+"
        )]),
    ),
    (&["minicpm5"], whole(&[DIGITS_OF_THREE, words!(r"\p{L}+", r"\p{N}+")])),
    (
        &["gemma4", "granite-embed-multi-311m"],
        PreTokenizer { adds_bos: true, byte_level: false, ..plain(&[LINES]) },
    ),
    (&["sarvam-moe"], PreTokenizer { byte_level: false, ..plain(&[LINES]) }),
];

/// The rules of a name; none for an unknown name.
pub(super) fn named(name: &str) -> Option<PreTokenizer> {
    ALL.iter().find(|(names, _)| names.contains(&name)).map(|(_, rules)| *rules)
}

/// All known names.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    ALL.iter().flat_map(|(names, _)| names.iter().copied())
}
