//! Lexemes in a template's tags.

/// The kind of a lexeme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LexemeKind {
    Name,
    Number,
    /// A text with its quotes.
    Text,
    Sign,
}

/// A name, number, text or sign in a tag.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lexeme<'a> {
    pub(super) kind: LexemeKind,
    pub(super) text: &'a str,
}

impl Lexeme<'_> {
    pub(super) fn is_name(&self, name: &str) -> bool {
        self.kind == LexemeKind::Name && self.text == name
    }

    pub(super) fn is_sign(&self, sign: &str) -> bool {
        self.kind == LexemeKind::Sign && self.text == sign
    }

    /// The lexeme for minijinja.
    pub(super) fn written(&self) -> String {
        match self.kind {
            LexemeKind::Name | LexemeKind::Sign => self.text.to_owned(),
            LexemeKind::Text => quoted(&self.value()),
            LexemeKind::Number => self.text.replace('_', ""),
        }
    }

    /// The value of a quoted text, by Python's rules.
    pub(super) fn value(&self) -> String {
        let inside = self.text.get(1..self.text.len().saturating_sub(1)).unwrap_or_default();
        unescaped(inside)
    }
}

/// A tag: from its opening to its closing braces.
pub(super) struct JinjaTag<'a> {
    pub(super) lexemes: Vec<Lexeme<'a>>,
    /// Number of bytes.
    pub(super) length: usize,
    /// Number of signs behind the opening braces, which say how white space is trimmed.
    pub(super) open_sign: usize,
    /// Number of signs before the closing braces.
    pub(super) close_sign: usize,
}

/// Signs of two characters, which take precedence over single ones.
const PAIRS: [&str; 6] = ["**", "//", "==", "!=", "<=", ">="];

/// Reads the tag at the beginning of `text`; none if it is not closed, or has invalid lexemes.
pub(super) fn tag(text: &str) -> Option<JinjaTag<'_>> {
    let close = if text.starts_with("{{") { "}}" } else { "%}" };
    let open_sign = usize::from(text[2..].starts_with(['-', '+']));
    let (mut at, mut depth, mut lexemes) = (2 + open_sign, 0usize, Vec::new());
    loop {
        let rest = text.get(at..)?;
        let first = rest.chars().next()?;
        if first.is_whitespace() {
            at += first.len_utf8();
            continue;
        }
        if depth == 0 {
            let is_signed = rest.starts_with(['-', '+']) && rest[1..].starts_with(close);
            if is_signed || rest.starts_with(close) {
                let close_sign = usize::from(is_signed);
                return Some(JinjaTag { lexemes, length: at + close_sign + 2, open_sign, close_sign });
            }
        }
        let (kind, length) = lexeme(rest, first)?;
        let text = &rest[..length];
        match text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.checked_sub(1)?,
            _ => {}
        }
        lexemes.push(Lexeme { kind, text });
        at += length;
    }
}

fn lexeme(rest: &str, first: char) -> Option<(LexemeKind, usize)> {
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    match first {
        '\'' | '"' => text_length(rest, first).map(|length| (LexemeKind::Text, length)),
        _ if first.is_ascii_digit() => Some((LexemeKind::Number, number_length(rest))),
        _ if is_word(first) => {
            Some((LexemeKind::Name, rest.find(|letter| !is_word(letter)).unwrap_or(rest.len())))
        }
        _ if PAIRS.iter().any(|pair| rest.starts_with(pair)) => Some((LexemeKind::Sign, 2)),
        _ if "+-*/%~()[]{},.:|<>=;".contains(first) => Some((LexemeKind::Sign, 1)),
        _ => None,
    }
}

fn text_length(rest: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    for (at, letter) in rest.char_indices().skip(1) {
        if letter == quote && !escaped {
            return Some(at + 1);
        }
        escaped = letter == '\\' && !escaped;
    }
    None
}

/// The length of an integer or of a number with a fraction or an exponent; `1.x` is an attribute of 1.
fn number_length(rest: &str) -> usize {
    let digits = |text: &str| {
        text.find(|letter: char| !(letter.is_ascii_digit() || letter == '_')).unwrap_or(text.len())
    };
    if ["0x", "0X", "0b", "0B", "0o", "0O"].iter().any(|base| rest.starts_with(base)) {
        let more = rest[2..].find(|letter: char| !(letter.is_ascii_hexdigit() || letter == '_'));
        return more.map_or(rest.len(), |more| more + 2);
    }
    let mut length = digits(rest);
    if rest[length..].starts_with('.') {
        let fraction = digits(&rest[length + 1..]);
        length += if fraction > 0 { 1 + fraction } else { 0 };
    }
    if rest[length..].starts_with(['e', 'E']) {
        let sign = usize::from(rest[length + 1..].starts_with(['+', '-']));
        let exponent = digits(&rest[length + 1 + sign..]);
        length += if exponent > 0 { 1 + sign + exponent } else { 0 };
    }
    length
}

/// A text in quotes, with the escapes that minijinja knows.
pub(super) fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('\'');
    for letter in text.chars() {
        match letter {
            '\'' | '\\' => quoted.extend(['\\', letter]),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            _ => quoted.push(letter),
        }
    }
    quoted.push('\'');
    quoted
}

/// Python's escapes; unknown ones stay unchanged.
fn unescaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let Some(letter) = rest.chars().next() else {
            out.push('\\');
            break;
        };
        let plain = match letter {
            '\n' => Some(""),
            '\\' => Some("\\"),
            '\'' => Some("'"),
            '"' => Some("\""),
            'a' => Some("\u{7}"),
            'b' => Some("\u{8}"),
            'f' => Some("\u{c}"),
            'n' => Some("\n"),
            'r' => Some("\r"),
            't' => Some("\t"),
            'v' => Some("\u{b}"),
            _ => None,
        };
        if let Some(plain) = plain {
            out.push_str(plain);
            rest = &rest[letter.len_utf8()..];
        } else if let Some((character, length)) = numbered(rest, letter) {
            out.push(character);
            rest = &rest[length..];
        } else {
            out.push('\\');
        }
    }
    out.push_str(rest);
    out
}

/// A character that is written as a number, and the number of bytes. UTF-16 surrogate pairs become one
/// character.
fn numbered(rest: &str, letter: char) -> Option<(char, usize)> {
    let number = |at: usize, digits: usize| u32::from_str_radix(rest.get(at..at + digits)?, 16).ok();
    let (code, length) = match letter {
        'x' => (number(1, 2)?, 3),
        'u' => (number(1, 4)?, 5),
        'U' => (number(1, 8)?, 9),
        '0'..='7' => {
            let length = rest.bytes().take(3).take_while(|byte| (b'0'..=b'7').contains(byte)).count();
            (u32::from_str_radix(&rest[..length], 8).ok()?, length)
        }
        _ => return None,
    };
    if (0xd800..0xdc00).contains(&code) && rest.get(length..length + 2) == Some("\\u") {
        let low = number(length + 2, 4).filter(|low| (0xdc00..0xe000).contains(low))?;
        return char::from_u32(0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00)).map(|c| (c, length + 6));
    }
    char::from_u32(code).map(|character| (character, length))
}
