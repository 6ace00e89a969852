//! Text from outside, as it may be shown on a terminal or written to a log.

use std::borrow::Cow;
use std::fmt::Write;

/// The text with characters escaped that would control a terminal, end a line or change the order in which a
/// line is read. These are control characters (C0, DEL, C1), line and paragraph separators, and marks of
/// direction.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, &is_control)
}

/// As [`printable`], for text of several lines, whose line ends and tabs stay.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped(text, &|letter| is_control(letter) && !matches!(letter, '\n' | '\t'))
}

/// Whether a terminal may act on a character, or show the text around it in another order.
pub fn is_control(letter: char) -> bool {
    let is_direction = matches!(letter, '\u{061C}' | '\u{200E}' | '\u{200F}' | '\u{2066}'..='\u{2069}');
    // From the line separator to the last override of direction.
    letter.is_control() || is_direction || matches!(letter, '\u{2028}'..='\u{202E}')
}

fn escaped<'a>(text: &'a str, is_escaped: &dyn Fn(char) -> bool) -> Cow<'a, str> {
    if !text.contains(is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for letter in text.chars() {
        match is_escaped(letter) {
            // Four digits, as in JSON: escaped characters need no more.
            true => write!(shown, "\\u{:04x}", u32::from(letter)).unwrap_or_default(),
            false => shown.push(letter),
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_controls_a_terminal_is_escaped() {
        for (text, shown) in [
            ("plain é 角 \u{1F600}", "plain é 角 \u{1F600}"),
            ("\x1b[2J\x1b]0;t\x07", r"\u001b[2J\u001b]0;t\u0007"),
            ("a\nb\r\tc\x7f", r"a\u000ab\u000d\u0009c\u007f"),
            ("\u{9b}31m", r"\u009b31m"),
            ("abc\u{202E}txt.exe\u{2066}", r"abc\u202etxt.exe\u2066"),
        ] {
            assert_eq!(printable(text), shown);
        }
        assert_eq!(printable_lines("a\n\tb\x1bc"), "a\n\tb\\u001bc");
    }

    #[test]
    fn escaped_json_says_the_same() {
        let name = "\u{9b}\u{7f}\u{202E}";
        let json = serde_json::to_string(name).unwrap();
        assert!(json.contains(name));
        assert_eq!(serde_json::from_str::<String>(&printable_lines(&json)).unwrap(), name);
    }
}
