//! Methods of Python's texts, lists and dictionaries.

use super::arguments::{bind, integer, text_or, truth};
use super::text::{is_printable, is_space, text};
use super::{items, long_text, pairs, work, wrong};
use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

type Result<T> = std::result::Result<T, Error>;

/// Calls a method that minijinja lacks.
pub(super) fn call(_: &mut State, value: &Value, method: &str, given: &[Value]) -> Result<Value> {
    match value.kind() {
        ValueKind::String => text_method(value.as_str().unwrap_or_default(), method, given),
        ValueKind::Map => map_method(value, method, given),
        ValueKind::Seq | ValueKind::Iterable => list_method(value, method, given),
        ValueKind::Number if method == "is_integer" => {
            let number = f64::try_from(value.clone());
            Ok(Value::from(value.is_integer() || number.is_ok_and(|number| number.fract() == 0.0)))
        }
        ValueKind::Plain if method == "fromkeys" => from_keys(given),
        _ => Err(unknown()),
    }
}

fn unknown() -> Error {
    Error::from(ErrorKind::UnknownMethod)
}

fn map_method(value: &Value, method: &str, given: &[Value]) -> Result<Value> {
    let (Some(pairs), false) = (pairs(value), super::operators::is_namespace(value)) else {
        return Err(unknown());
    };
    work(pairs.len())?;
    match method {
        "get" => {
            let [key, default] = bind("get", given, ["key", "default"])?;
            let key = key.ok_or_else(|| wrong("get: the key is missing"))?;
            let found = value.as_object().and_then(|map| map.get_value(&key));
            Ok(found.or(default).unwrap_or(Value::from(())))
        }
        "keys" => Ok(pairs.into_iter().map(|(key, _)| key).collect()),
        "values" => Ok(pairs.into_iter().map(|(_, item)| item).collect()),
        "items" => Ok(pairs.into_iter().map(|(key, item)| Value::from(Tuple::from([key, item]))).collect()),
        "copy" => Ok(Value::from_pairs(pairs)),
        _ => Err(unknown()),
    }
}

/// `dict.fromkeys`.
fn from_keys(given: &[Value]) -> Result<Value> {
    let [keys, value] = bind("fromkeys", given, ["iterable", "value"])?;
    let keys = items(&keys.unwrap_or_default())?;
    let value = value.unwrap_or(Value::from(()));
    Ok(Value::from_pairs(keys.into_iter().map(|key| (key, value.clone()))))
}

fn list_method(value: &Value, method: &str, given: &[Value]) -> Result<Value> {
    match method {
        "count" | "index" => {
            let [wanted] = bind(method, given, ["value"])?;
            let wanted = wanted.ok_or_else(|| wrong(format!("{method}: the value is missing")))?;
            let list = items(value)?;
            match method {
                "count" => Ok(Value::from(list.iter().filter(|item| **item == wanted).count())),
                _ => list
                    .iter()
                    .position(|item| *item == wanted)
                    .map(Value::from)
                    .ok_or_else(|| wrong("index: it is not in the list")),
            }
        }
        "copy" => Ok(Value::from(items(value)?)),
        _ => Err(unknown()),
    }
}

fn text_method(of: &str, method: &str, given: &[Value]) -> Result<Value> {
    work(of.len() / 16)?;
    let found = [whole, tested, divided, searched, padded]
        .iter()
        .find_map(|kind| kind(of, method, given).transpose());
    found.unwrap_or_else(|| Err(unknown()))
}

/// Methods that change a text as a whole.
fn whole(of: &str, method: &str, given: &[Value]) -> Result<Option<Value>> {
    let changed = match method {
        "upper" => of.to_uppercase(),
        "lower" => of.to_lowercase(),
        "casefold" => case_folded(of),
        "capitalize" => capitalized(of),
        "title" => titled(of),
        "swapcase" => of
            .chars()
            .flat_map(|letter| match letter.is_uppercase() {
                true => letter.to_lowercase().collect::<Vec<_>>(),
                false => letter.to_uppercase().collect(),
            })
            .collect(),
        "strip" | "lstrip" | "rstrip" => {
            let [letters] = bind(method, given, ["chars"])?;
            return Ok(Some(Value::from(stripped(of, method, &letters)?)));
        }
        "removeprefix" | "removesuffix" => {
            let [part] = bind(method, given, ["part"])?;
            let part = text_or(method, &part, "")?;
            let rest = if method == "removeprefix" { of.strip_prefix(part) } else { of.strip_suffix(part) };
            return Ok(Some(Value::from(rest.unwrap_or(of))));
        }
        "replace" => {
            let [old, new, count] = bind(method, given, ["old", "new", "count"])?;
            return replaced(
                of,
                text_or(method, &old, "")?,
                text_or(method, &new, "")?,
                integer(method, &count)?,
            )
            .map(Some);
        }
        "format" | "format_map" => return form(of, method, given).map(Some),
        "join" => {
            let [list] = bind(method, given, ["iterable"])?;
            return joined(of, &items(&list.unwrap_or_default())?).map(Some);
        }
        _ => return Ok(None),
    };
    let [] = bind(method, given, [])?;
    Ok(Some(Value::from(changed)))
}

/// The first letter in upper case and all others in lower case.
pub(super) fn capitalized(of: &str) -> String {
    let mut letters = of.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(letters.as_str().to_lowercase().chars()).collect()
    })
}

/// `str.casefold`: lower case, with letters such as "ß" as the letters of their upper case.
fn case_folded(of: &str) -> String {
    let fold = |letter: char| match letter {
        'ı' => vec!['ı'],
        _ => letter.to_uppercase().flat_map(char::to_lowercase).collect(),
    };
    of.chars().flat_map(fold).collect()
}

fn titled(of: &str) -> String {
    let mut in_word = false;
    let mut title = String::with_capacity(of.len());
    for letter in of.chars() {
        match in_word {
            true => title.extend(letter.to_lowercase()),
            false => title.extend(letter.to_uppercase()),
        }
        in_word = letter.is_lowercase() || letter.is_uppercase();
    }
    title
}

/// A text without white space, or `letters`, at its ends.
pub(super) fn stripped<'a>(of: &'a str, method: &str, letters: &Option<Value>) -> Result<&'a str> {
    let letters = letters.as_ref().filter(|letters| !letters.is_none());
    let letters =
        letters.map(|letters| letters.as_str().ok_or_else(|| wrong(format!("{method}: expected a text"))));
    let letters = letters.transpose()?;
    let goes = |letter: char| letters.map_or_else(|| is_space(letter), |letters| letters.contains(letter));
    Ok(match method {
        "lstrip" => of.trim_start_matches(goes),
        "rstrip" => of.trim_end_matches(goes),
        _ => of.trim_matches(goes),
    })
}

/// `str.replace`; a negative count means all.
pub(super) fn replaced(of: &str, old: &str, new: &str, count: Option<i64>) -> Result<Value> {
    let most = of.len() / old.len().max(1) + 1;
    let count = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(most);
    long_text("replace", of.len().saturating_add(count.min(most).saturating_mul(new.len())))?;
    Ok(Value::from(of.replacen(old, new, count)))
}

fn joined(between: &str, list: &[Value]) -> Result<Value> {
    long_text("join", between.len().saturating_mul(list.len()))?;
    let texts = list.iter().map(|item| item.as_str().ok_or_else(|| wrong("join: an item is not a text")));
    let texts = texts.collect::<Result<Vec<&str>>>()?;
    let length: usize = texts.iter().map(|text| text.len()).sum();
    long_text("join", length.saturating_add(between.len().saturating_mul(texts.len())))?;
    Ok(Value::from(texts.join(between)))
}

/// `str.format`, with containers as Python writes them.
fn form(of: &str, method: &str, given: &[Value]) -> Result<Value> {
    super::super::template_limits::check_widths(of)?;
    if method == "format_map" {
        let [map] = bind(method, given, ["mapping"])?;
        let pairs = map.as_ref().and_then(pairs).ok_or_else(|| wrong("format_map: expected a map"))?;
        let named =
            pairs.into_iter().map(|(key, item)| Ok((text(&key)?, item))).collect::<Result<Kwargs>>()?;
        return form(of, "format", &[named.into()]);
    }
    let is_plain =
        |value: &Value| value.is_kwargs() || value.kind() == ValueKind::Map || of.contains(['[', '.']);
    let mut values = Vec::with_capacity(given.len());
    for value in given {
        let is_list = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
        values.push(if is_list && !is_plain(value) { Value::from(text(value)?) } else { value.clone() });
    }
    let formatted = format(FormatStyle::StrFormat, of, &values)?;
    long_text("format", formatted.len())?;
    Ok(Value::from(formatted))
}

/// Methods that test all letters.
fn tested(of: &str, method: &str, given: &[Value]) -> Result<Option<Value>> {
    let all = |test: fn(char) -> bool| !of.is_empty() && of.chars().all(test);
    let is_cased = |letter: char| letter.is_lowercase() || letter.is_uppercase();
    let answer = match method {
        "islower" => of.chars().any(is_cased) && !of.chars().any(char::is_uppercase),
        "isupper" => of.chars().any(is_cased) && !of.chars().any(char::is_lowercase),
        "istitle" => of.chars().any(is_cased) && titled(of) == of,
        "isspace" => all(is_space),
        "isdecimal" => all(|letter| letter.is_ascii_digit()),
        "isdigit" => all(|letter| letter.is_ascii_digit() || "²³¹⁰⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉".contains(letter)),
        "isnumeric" => all(char::is_numeric),
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isascii" => of.is_ascii(),
        "isprintable" => of.chars().all(is_printable),
        "isidentifier" => {
            let begins = of.starts_with(|letter: char| letter.is_alphabetic() || letter == '_');
            begins && of.chars().all(|letter| letter.is_alphanumeric() || letter == '_')
        }
        _ => return Ok(None),
    };
    let [] = bind(method, given, [])?;
    Ok(Some(Value::from(answer)))
}

/// Methods that divide a text.
fn divided(of: &str, method: &str, given: &[Value]) -> Result<Option<Value>> {
    Ok(Some(match method {
        "split" | "rsplit" => {
            let [separator, most] = bind(method, given, ["sep", "maxsplit"])?;
            let separator = separator.filter(|separator| !separator.is_none());
            let most = integer(method, &most)?.and_then(|most| usize::try_from(most).ok());
            let parts = match &separator {
                None => split_at_spaces(of, most, method == "rsplit"),
                Some(_) => split_at(of, text_or(method, &separator, "")?, most, method == "rsplit")?,
            };
            work(parts.len())?;
            parts.into_iter().map(Value::from).collect()
        }
        "splitlines" => {
            let [keep] = bind(method, given, ["keepends"])?;
            lines(of, truth(&keep, false)).into_iter().map(Value::from).collect()
        }
        "partition" | "rpartition" => {
            let [separator] = bind(method, given, ["sep"])?;
            let separator = text_or(method, &separator, "")?;
            if separator.is_empty() {
                return Err(wrong(format!("{method}: the separator is empty")));
            }
            let (at, whole) = match method {
                "partition" => (of.find(separator), [of, "", ""]),
                _ => (of.rfind(separator), ["", "", of]),
            };
            let parts = at.map_or(whole, |at| [&of[..at], separator, &of[at + separator.len()..]]);
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        _ => return Ok(None),
    }))
}

fn split_at<'a>(of: &'a str, separator: &str, most: Option<usize>, from_end: bool) -> Result<Vec<&'a str>> {
    if separator.is_empty() {
        return Err(wrong("split: the separator is empty"));
    }
    Ok(match (most, from_end) {
        (None, _) => of.split(separator).collect(),
        (Some(most), false) => of.splitn(most.saturating_add(1), separator).collect(),
        (Some(most), true) => {
            let mut parts: Vec<&str> = of.rsplitn(most.saturating_add(1), separator).collect();
            parts.reverse();
            parts
        }
    })
}

/// The rest after the last division keeps its outer white space.
fn split_at_spaces(of: &str, most: Option<usize>, from_end: bool) -> Vec<&str> {
    let most = most.unwrap_or(usize::MAX);
    let mut parts = Vec::new();
    let near = |rest: &'_ str| match from_end {
        true => rest.trim_end_matches(is_space).len(),
        false => rest.len() - rest.trim_start_matches(is_space).len(),
    };
    let mut rest = if from_end { &of[..near(of)] } else { &of[near(of)..] };
    while parts.len() < most {
        let at =
            if from_end { rest.trim_start_matches(is_space).rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = at else { break };
        if from_end {
            let at = at + rest.len() - rest.trim_start_matches(is_space).len();
            let length = rest[at..].chars().next().map_or(0, char::len_utf8);
            parts.push(&rest[at + length..]);
            rest = rest[..at].trim_end_matches(is_space);
        } else {
            parts.push(&rest[..at]);
            rest = rest[at..].trim_start_matches(is_space);
        }
    }
    let rest = match parts.len() < most {
        true => rest.trim_matches(is_space),
        false => rest,
    };
    if !rest.is_empty() {
        parts.push(rest);
    }
    if from_end {
        parts.reverse();
    }
    parts
}

/// `str.splitlines`.
pub(super) fn lines(of: &str, keep: bool) -> Vec<&str> {
    let ends = |letter: char| {
        matches!(
            letter,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let (mut found, mut rest) = (Vec::new(), of);
    while let Some(at) = rest.find(ends) {
        let length = match rest[at..].starts_with("\r\n") {
            true => 2,
            false => rest[at..].chars().next().map_or(1, char::len_utf8),
        };
        found.push(&rest[..if keep { at + length } else { at }]);
        rest = &rest[at + length..];
    }
    if !rest.is_empty() {
        found.push(rest);
    }
    found
}

/// Methods that search a text.
fn searched(of: &str, method: &str, given: &[Value]) -> Result<Option<Value>> {
    if !["find", "rfind", "index", "rindex", "count", "startswith", "endswith"].contains(&method) {
        return Ok(None);
    }
    let [wanted, start, stop] = bind(method, given, ["sub", "start", "end"])?;
    let wanted = wanted.ok_or_else(|| wrong(format!("{method}: the searched text is missing")))?;
    let (start, stop) = (integer(method, &start)?, integer(method, &stop)?);
    let length = i64::try_from(of.chars().count()).unwrap_or(i64::MAX);
    let place = |at: i64| if at < 0 { (at + length).max(0) } else { at.min(length) };
    let (first, last) = (place(start.unwrap_or(0)), place(stop.unwrap_or(length)));
    let byte = |at: i64| {
        let at = usize::try_from(at).unwrap_or(0);
        of.char_indices().nth(at).map_or(of.len(), |(at, _)| at)
    };
    let is_outside = first > last || start.is_some_and(|start| start > length);
    let part = if is_outside { None } else { Some(&of[byte(first)..byte(last)]) };
    if let "startswith" | "endswith" = method {
        let wanted = if wanted.is_tuple() { items(&wanted)? } else { vec![wanted] };
        let mut found = false;
        for wanted in &wanted {
            let wanted = wanted
                .as_str()
                .ok_or_else(|| wrong(format!("{method}: expected a text or a tuple of texts")))?;
            let fits = |part: &str| {
                if method == "startswith" { part.starts_with(wanted) } else { part.ends_with(wanted) }
            };
            found |= part.is_some_and(fits);
        }
        return Ok(Some(Value::from(found)));
    }
    let wanted = wanted.as_str().ok_or_else(|| wrong(format!("{method}: expected a text")))?;
    if method == "count" {
        return Ok(Some(Value::from(part.map_or(0, |part| part.matches(wanted).count()))));
    }
    let at =
        part.and_then(|part| if method.starts_with('r') { part.rfind(wanted) } else { part.find(wanted) });
    let at =
        at.and_then(|at| part.map(|part| first + i64::try_from(part[..at].chars().count()).unwrap_or(0)));
    match at {
        Some(at) => Ok(Some(Value::from(at))),
        None if method.ends_with("index") => Err(wrong(format!("{method}: it is not in the text"))),
        None => Ok(Some(Value::from(-1))),
    }
}

/// Methods that make a text longer.
fn padded(of: &str, method: &str, given: &[Value]) -> Result<Option<Value>> {
    if !["zfill", "center", "ljust", "rjust", "expandtabs"].contains(&method) {
        return Ok(None);
    }
    let [width, fill] =
        bind(method, given, [if method == "expandtabs" { "tabsize" } else { "width" }, "fillchar"])?;
    let default = if method == "expandtabs" { Some(8) } else { None };
    let width = integer(method, &width)?
        .or(default)
        .ok_or_else(|| wrong(format!("{method}: the width is missing")))?;
    let width = usize::try_from(width).unwrap_or(0);
    if method == "expandtabs" {
        long_text(method, of.len().saturating_add(of.matches('\t').count().saturating_mul(width)))?;
        return Ok(Some(Value::from(expanded(of, width))));
    }
    let missing = width.saturating_sub(of.chars().count());
    long_text(method, of.len().saturating_add(missing.saturating_mul(4)))?;
    let fill = text_or(method, &fill, " ")?;
    let (left, right) = match method {
        "center" => {
            let left = missing / 2 + (missing & width & 1);
            (left, missing - left)
        }
        "ljust" => (0, missing),
        _ => (missing, 0),
    };
    if method == "zfill" {
        let signed = usize::from(of.starts_with(['-', '+']));
        return Ok(Some(Value::from(format!("{}{}{}", &of[..signed], "0".repeat(missing), &of[signed..]))));
    }
    Ok(Some(Value::from([fill.repeat(left).as_str(), of, &fill.repeat(right)].concat())))
}

fn expanded(of: &str, width: usize) -> String {
    let (mut out, mut column) = (String::with_capacity(of.len()), 0);
    for letter in of.chars() {
        match letter {
            '\t' => {
                let spaces = if width == 0 { 0 } else { width - column % width };
                out.push_str(&" ".repeat(spaces));
                column += spaces;
            }
            '\n' | '\r' => {
                out.push(letter);
                column = 0;
            }
            _ => {
                out.push(letter);
                column += 1;
            }
        }
    }
    out
}
