//! Filters that minijinja lacks or that differ from jinja2's.

use super::arguments::{Given, bind, integer, split, text_or, truth};
use super::methods::{capitalized, lines, replaced, stripped};
use super::text::{text, with_text};
use super::{items, json, long_text, operators, pairs, work, wrong};
use minijinja::value::{Enumerator, Object, ObjectRepr, Tuple, ValueKind};
use minijinja::{Environment, Error, State, Value};
use std::cmp::Ordering;
use std::sync::Arc;

type Result<T> = std::result::Result<T, Error>;

/// Maximum width of an indentation; Python has none.
const WIDTH_MAX: i64 = 1000;

pub(super) fn add(environment: &mut Environment<'_>) {
    environment.add_filter("tojson", json::tojson);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("first", |value: &Value| end_of(value, true));
    environment.add_filter("last", |value: &Value| end_of(value, false));
    environment.add_filter("list", |value: &Value| items(value).map(Value::from));
    environment.add_filter("string", |value: &Value| text(value).map(Value::from));
    environment.add_filter("items", |value: &Value| pairs_of(value));
    environment.add_filter("dictsort", dictsort);
    environment.add_filter("sort", sort);
    environment.add_filter("unique", unique);
    environment.add_filter("max", |value: &Value, given: Given| extreme(value, given, Ordering::Greater));
    environment.add_filter("min", |value: &Value, given: Given| extreme(value, given, Ordering::Less));
    environment.add_filter("reverse", reverse);
    environment.add_filter("join", join);
    environment.add_filter("sum", sum);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("round", round);
    environment.add_filter("format", |value: &Value, given: Given| {
        operators::formatted(&text(value)?, &given.into_values())
    });
    environment.add_filter("upper", |value: &Value| text(value).map(|text| text.to_uppercase()));
    environment.add_filter("lower", |value: &Value| text(value).map(|text| text.to_lowercase()));
    environment.add_filter("capitalize", |value: &Value| text(value).map(|text| capitalized(&text)));
    environment.add_filter("title", title);
    environment.add_filter("trim", trim);
    environment.add_filter("replace", replace);
    environment.add_filter("indent", indent);
    environment.add_filter("center", center);
    environment.add_filter("truncate", truncate);
    environment.add_filter("groupby", group_by);
    environment.add_filter("e", escape);
    environment.add_filter("escape", escape);
    environment.add_filter("forceescape", |value: &Value| {
        operators::escaped(&text(value)?).map(Value::from_safe_string)
    });
    environment.add_filter("urlencode", url_encode);
    environment.add_filter("pprint", pretty);
    environment.add_filter("wordcount", |value: &Value| text(value).map(|text| word_count(&text)));
    environment.add_function("dict", dict);
    environment
        .add_function("raise_exception", |message: &Value| -> Result<Value> { Err(wrong(text(message)?)) });
}

fn default(value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [other, boolean] = bind("default", &given, ["default_value", "boolean"])?;
    let is_missing = value.is_undefined() || truth(&boolean, false) && !value.is_true();
    Ok(if is_missing { other.unwrap_or(Value::from("")) } else { value.clone() })
}

fn length(value: &Value) -> Result<usize> {
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        ValueKind::String => Ok(value.as_str().unwrap_or_default().chars().count()),
        _ => value.len().ok_or_else(|| wrong(format!("a value of the kind {} has no length", value.kind()))),
    }
}

fn end_of(value: &Value, is_first: bool) -> Result<Value> {
    let mut all = items(value)?;
    if is_first {
        all.truncate(1);
    }
    Ok(all.pop().unwrap_or_default())
}

fn pairs_of(value: &Value) -> Result<Value> {
    if value.is_undefined() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    let pairs = pairs(value).ok_or_else(|| wrong("items: expected a map"))?;
    work(pairs.len())?;
    Ok(pairs.into_iter().map(|(key, item)| Value::from(Tuple::from([key, item]))).collect())
}

/// The keys by which values are compared: texts ignoring case, unless requested.
fn sort_key(value: &Value, case_sensitive: bool) -> Value {
    match value.as_str() {
        Some(text) if !case_sensitive => Value::from(text.to_lowercase()),
        _ => value.clone(),
    }
}

fn compare(a: &Value, b: &Value, reverse: bool) -> Ordering {
    let order = operators::order(a, b).ok().flatten().unwrap_or(Ordering::Equal);
    if reverse { order.reverse() } else { order }
}

/// Refuses values that Python cannot sort.
fn check_order(keys: impl Iterator<Item = Value>) -> Result<()> {
    let mut before: Option<Value> = None;
    for key in keys {
        if let Some(before) = &before {
            operators::order(before, &key)?;
        }
        before = Some(key);
    }
    Ok(())
}

fn dictsort(value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [case, by, reverse] = bind("dictsort", &given, ["case_sensitive", "by", "reverse"])?;
    let (case, reverse) = (truth(&case, false), truth(&reverse, false));
    let by_value = text_or("dictsort", &by, "key")? == "value";
    let mut pairs = pairs(value).ok_or_else(|| wrong("dictsort: expected a map"))?;
    work(pairs.len().saturating_mul(8))?;
    let key = |pair: &(Value, Value)| sort_key(if by_value { &pair.1 } else { &pair.0 }, case);
    check_order(pairs.iter().map(key))?;
    pairs.sort_by(|a, b| compare(&key(a), &key(b), reverse));
    Ok(pairs.into_iter().map(|(key, item)| Value::from(Tuple::from([key, item]))).collect())
}

/// The attribute of an item by a path such as `a.0.b`.
fn at_path(item: &Value, path: &Value) -> Result<Value> {
    let mut found = item.clone();
    for part in with_text(path, |path| Ok(path.split('.').map(str::to_owned).collect::<Vec<_>>()))? {
        found = match part.parse::<i64>() {
            Ok(index) => found.get_item(&Value::from(index))?,
            Err(_) => found.get_attr(&part)?,
        };
    }
    Ok(found)
}

fn sort(value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [reverse, case, attribute] = bind("sort", &given, ["reverse", "case_sensitive", "attribute"])?;
    let (reverse, case) = (truth(&reverse, false), truth(&case, false));
    let mut keyed = Vec::new();
    for item in items(value)? {
        let mut keys = Vec::new();
        match attribute.as_ref().filter(|attribute| !attribute.is_none()) {
            None => keys.push(sort_key(&item, case)),
            Some(attribute) => {
                for path in text(attribute)?.split(',') {
                    keys.push(sort_key(&at_path(&item, &Value::from(path.trim()))?, case));
                }
            }
        }
        keyed.push((keys, item));
    }
    work(keyed.len().saturating_mul(8))?;
    check_order(keyed.iter().map(|(keys, _)| Value::from(keys.clone())))?;
    keyed.sort_by(|a, b| {
        let orders = a.0.iter().zip(&b.0).map(|(a, b)| compare(a, b, reverse));
        orders.fold(Ordering::Equal, Ordering::then)
    });
    Ok(keyed.into_iter().map(|(_, item)| item).collect())
}

/// The first of the items with the least key, or with the greatest if `wanted` says so.
fn extreme(value: &Value, given: Given, wanted: Ordering) -> Result<Value> {
    let given = given.into_values();
    let [case, attribute] = bind("min or max", &given, ["case_sensitive", "attribute"])?;
    let mut best: Option<(Value, Value)> = None;
    for item in items(value)? {
        let of = attribute.as_ref().map_or_else(|| Ok(item.clone()), |path| at_path(&item, path))?;
        let key = sort_key(&of, truth(&case, false));
        let is_better = match &best {
            Some((other, _)) => operators::order(&key, other)? == Some(wanted),
            None => true,
        };
        if is_better {
            best = Some((key, item));
        }
    }
    Ok(best.map(|(_, item)| item).unwrap_or_default())
}

fn unique(value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [case, attribute] = bind("unique", &given, ["case_sensitive", "attribute"])?;
    let (mut seen, mut found) = (std::collections::HashSet::new(), Vec::new());
    for item in items(value)? {
        let of = attribute.as_ref().map_or_else(|| Ok(item.clone()), |path| at_path(&item, path))?;
        if seen.insert(sort_key(&of, truth(&case, false))) {
            found.push(item);
        }
    }
    Ok(Value::from(found))
}

/// Groups of items by an attribute, in the attribute's order.
fn group_by(value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [attribute, default, case] = bind("groupby", &given, ["attribute", "default", "case_sensitive"])?;
    let path = attribute.ok_or_else(|| wrong("groupby: the attribute is missing"))?;
    let case = truth(&case, false);
    let mut keyed = Vec::new();
    for item in items(value)? {
        let found = at_path(&item, &path).ok().filter(|found| !found.is_undefined());
        keyed.push((found.or_else(|| default.clone()).unwrap_or_default(), item));
    }
    work(keyed.len().saturating_mul(8))?;
    check_order(keyed.iter().map(|(key, _)| sort_key(key, case)))?;
    keyed.sort_by(|a, b| compare(&sort_key(&a.0, case), &sort_key(&b.0, case), false));
    let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
    for (key, item) in keyed {
        match groups.last_mut().filter(|(last, _)| sort_key(last, case) == sort_key(&key, case)) {
            Some((_, group)) => group.push(item),
            None => groups.push((key, vec![item])),
        }
    }
    let group = |(key, list)| Value::from_object(GroupedItems { key, list: Value::from(list) });
    Ok(groups.into_iter().map(group).collect())
}

/// A pair of a key and the list of its items, which also have names.
#[derive(Debug)]
struct GroupedItems {
    key: Value,
    list: Value,
}

impl Object for GroupedItems {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match (key.as_str(), key.as_usize()) {
            (Some("grouper"), _) | (_, Some(0)) => Some(self.key.clone()),
            (Some("list"), _) | (_, Some(1)) => Some(self.list.clone()),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(2)
    }
}

fn escape(value: &Value) -> Result<Value> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    Ok(Value::from_safe_string(operators::escaped(&text(value)?)?))
}

/// Quotes a text for a URL; of a map or of pairs, its query.
fn url_encode(value: &Value) -> Result<String> {
    let pairs = match (pairs(value), value.kind()) {
        (Some(pairs), _) => pairs,
        (None, ValueKind::Seq | ValueKind::Iterable) => pairs_in("urlencode", value)?,
        (None, _) => return quoted(&text(value)?, false),
    };
    let mut query = Vec::with_capacity(pairs.len());
    for (key, item) in pairs {
        query.push(format!("{}={}", quoted(&text(&key)?, true)?, quoted(&text(&item)?, true)?));
    }
    Ok(query.join("&"))
}

fn quoted(of: &str, in_query: bool) -> Result<String> {
    long_text("urlencode", of.len().saturating_mul(3))?;
    let mut all = String::with_capacity(of.len());
    for byte in of.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => all.push(char::from(byte)),
            b'/' if !in_query => all.push('/'),
            b' ' if in_query => all.push('+'),
            _ => all.push_str(&format!("%{byte:02X}")),
        }
    }
    Ok(all)
}

/// `pprint` of values that fit in a line, with the keys of maps in order.
fn pretty(value: &Value) -> Result<String> {
    const LINE_MAX: usize = 80;
    let line = text(&Value::from(vec![in_order(value, 0)?]))?;
    match line.chars().count() > LINE_MAX + 2 && value.as_str().is_none_or(|text| text.contains([' ', '\n']))
    {
        true => Err(wrong(format!("pprint: values of more than {LINE_MAX} characters are not supported"))),
        false => Ok(line[1..line.len() - 1].to_owned()),
    }
}

/// A value whose maps have their keys in order.
fn in_order(value: &Value, depth: usize) -> Result<Value> {
    if depth > super::NESTING_MAX {
        return Err(wrong("pprint: the value is too deep"));
    }
    if let Some(mut pairs) = pairs(value) {
        check_order(pairs.iter().map(|(key, _)| key.clone()))?;
        pairs.sort_by(|a, b| compare(&a.0, &b.0, false));
        let inner = pairs.into_iter().map(|(key, item)| Ok((key, in_order(&item, depth + 1)?)));
        return Ok(Value::from_pairs(inner.collect::<Result<Vec<_>>>()?));
    }
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
        return Ok(value.clone());
    }
    let inner = items(value)?.iter().map(|item| in_order(item, depth + 1)).collect::<Result<Vec<_>>>()?;
    Ok(if value.is_tuple() { Value::from(Tuple::new(inner)) } else { Value::from(inner) })
}

fn reverse(value: &Value) -> Result<Value> {
    let mut all = items(value)?;
    all.reverse();
    Ok(match value.as_str() {
        Some(_) => Value::from(all.iter().filter_map(Value::as_str).collect::<String>()),
        None => Value::from(all),
    })
}

fn join(value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [between, attribute] = bind("join", &given, ["d", "attribute"])?;
    let between = text(&between.unwrap_or(Value::from("")))?;
    if let Some(text) = value.as_str() {
        // each join of a chain can double a text
        let is_long = text.len() > super::ITEMS_MAX / 4;
        long_text("join", if is_long { usize::MAX } else { text.len().saturating_mul(between.len() + 1) })?;
    }
    let mut all = String::new();
    for (at, item) in items(value)?.iter().enumerate() {
        let item = attribute.as_ref().map_or_else(|| Ok(item.clone()), |path| at_path(item, path))?;
        with_text(&item, |text| {
            if all.len() + text.len() + between.len() > super::TEXT_BYTES_MAX {
                long_text("join", usize::MAX)?;
            }
            all.push_str(if at == 0 { "" } else { &between });
            all.push_str(text);
            Ok(())
        })?;
    }
    long_text("join", all.len())?;
    Ok(Value::from(all))
}

fn sum(value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [attribute, start] = bind("sum", &given, ["attribute", "start"])?;
    let mut total = start.unwrap_or(Value::from(0));
    for item in items(value)? {
        let attribute = attribute.as_ref().filter(|attribute| !attribute.is_none());
        let item = attribute.map_or_else(|| Ok(item.clone()), |path| at_path(&item, path))?;
        total = operators::sum(&total, &item)?;
    }
    Ok(total)
}

fn int(value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [default, base] = bind("int", &given, ["default", "base"])?;
    let base = integer("int", &base)?.unwrap_or(10);
    let whole = |number: f64| {
        #[expect(clippy::cast_possible_truncation, reason = "larger ones are refused before")]
        let whole = (number.is_finite() && number.abs() < 1e30).then(|| number.trunc() as i128);
        whole.map(operators::integer_value)
    };
    let found = match value.kind() {
        ValueKind::Bool => Some(Value::from(i64::from(value.is_true()))),
        ValueKind::Number if value.is_integer() => Some(value.clone()),
        ValueKind::Number => f64::try_from(value.clone()).ok().and_then(whole),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default().trim().replace('_', "");
            let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base)).unwrap_or(10);
            let digits = text.trim_start_matches(['+', '-']);
            let prefix = match base {
                16 => "0x",
                8 => "0o",
                2 => "0b",
                _ => "",
            };
            let digits = digits.strip_prefix(prefix).unwrap_or(digits);
            let parsed = i128::from_str_radix(digits, base).ok();
            let parsed = parsed.map(|number| if text.starts_with('-') { -number } else { number });
            parsed.map(operators::integer_value).or_else(|| text.parse::<f64>().ok().and_then(whole))
        }
        _ => None,
    };
    Ok(found.or(default).unwrap_or(Value::from(0)))
}

fn float(value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [default] = bind("float", &given, ["default"])?;
    let found = match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        ValueKind::String => value.as_str().unwrap_or_default().trim().parse().ok(),
        _ => None,
    };
    Ok(found.map(Value::from).or(default).unwrap_or(Value::from(0.0)))
}

fn round(value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [precision, method] = bind("round", &given, ["precision", "method"])?;
    let precision = integer("round", &precision)?.unwrap_or(0).clamp(-300, 300);
    let number = f64::try_from(value.clone()).map_err(|_| wrong("round: expected a number"))?;
    let scale = 10f64.powi(i32::try_from(precision).unwrap_or(0));
    let rounded = match text_or("round", &method, "common")? {
        "ceil" => (number * scale).ceil() / scale,
        "floor" => (number * scale).floor() / scale,
        "common" if precision >= 0 => {
            let places = usize::try_from(precision).unwrap_or(0);
            // to the nearest, ties to even, of the exact value
            format!("{number:.places$}").parse().unwrap_or(number)
        }
        "common" => (number * scale).round_ties_even() / scale,
        _ => return Err(wrong("round: the method is common, ceil or floor")),
    };
    Ok(if value.is_integer() && method.is_none() {
        operators::integer_value(i128::try_from(value.clone()).unwrap_or(0))
    } else {
        Value::from(rounded)
    })
}

fn title(value: &Value) -> Result<String> {
    let mut title = String::new();
    let mut begins = true;
    for letter in text(value)?.chars() {
        match begins {
            true => title.extend(letter.to_uppercase()),
            false => title.extend(letter.to_lowercase()),
        }
        begins = letter.is_whitespace() || "-({[<".contains(letter);
    }
    Ok(title)
}

fn trim(value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [letters] = bind("trim", &given, ["chars"])?;
    let trimmed = with_text(value, |text| stripped(text, "strip", &letters).map(str::to_owned))?;
    Ok(if value.is_safe() { Value::from_safe_string(trimmed) } else { Value::from(trimmed) })
}

fn replace(value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [old, new, count] = bind("replace", &given, ["old", "new", "count"])?;
    let (old, new) = (text(&old.unwrap_or_default())?, text(&new.unwrap_or_default())?);
    replaced(&text(value)?, &old, &new, integer("replace", &count)?)
}

fn indent(value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [width, first, blank] = bind("indent", &given, ["width", "first", "blank"])?;
    let by = match &width {
        Some(width) if width.as_str().is_some() => text(width)?,
        _ => {
            let width = integer("indent", &width)?.unwrap_or(4);
            if width > WIDTH_MAX {
                return Err(wrong(format!("indent: {width} is more than {WIDTH_MAX}")));
            }
            " ".repeat(usize::try_from(width).unwrap_or(0))
        }
    };
    let blank = truth(&blank, false);
    let of = text(value)? + "\n";
    let lines = lines(&of, false);
    long_text("indent", of.len().saturating_add(lines.len().saturating_mul(by.len())))?;
    let mut all = String::new();
    for (at, line) in lines.iter().enumerate() {
        let indents = if at == 0 { truth(&first, false) } else { blank || !line.is_empty() };
        all.push_str(if at == 0 { "" } else { "\n" });
        all.push_str(if indents { &by } else { "" });
        all.push_str(line);
    }
    Ok(Value::from(all))
}

fn center(state: &mut State, value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [width] = bind("center", &given, ["width"])?;
    Value::from(text(value)?).call_method(state, "center", &[width.unwrap_or(Value::from(80))])
}

fn truncate(value: &Value, given: Given) -> Result<Value> {
    let given = given.into_values();
    let [length, kill, end, leeway] = bind("truncate", &given, ["length", "killwords", "end", "leeway"])?;
    let count = |value: &Option<Value>, default: i64| {
        Ok::<_, Error>(usize::try_from(integer("truncate", value)?.unwrap_or(default)).unwrap_or(0))
    };
    let (length, leeway) = (count(&length, 255)?, count(&leeway, 5)?);
    let end = text_or("truncate", &end, "...")?;
    let of = text(value)?;
    if of.chars().count() <= length.saturating_add(leeway) {
        return Ok(Value::from(of));
    }
    let kept: String = of.chars().take(length.saturating_sub(end.chars().count())).collect();
    let kept = if truth(&kill, false) {
        &kept[..]
    } else {
        kept.rsplit_once(' ').map_or(&kept[..], |(words, _)| words)
    };
    Ok(Value::from(format!("{kept}{end}")))
}

fn word_count(text: &str) -> usize {
    text.split(|letter: char| !(letter.is_alphanumeric() || letter == '_'))
        .filter(|word| !word.is_empty())
        .count()
}

/// The pairs of a list.
fn pairs_in(what: &str, list: &Value) -> Result<Vec<(Value, Value)>> {
    let mut all = Vec::new();
    for pair in items(list)? {
        match &items(&pair)?[..] {
            [key, item] => all.push((key.clone(), item.clone())),
            _ => return Err(wrong(format!("{what}: expected pairs of a key and a value"))),
        }
    }
    Ok(all)
}

/// `dict` of a map or of pairs, and of named values.
fn dict(given: Given) -> Result<Value> {
    let given = given.into_values();
    let (named, others) = split(&given);
    let mut all = match others {
        [] => Vec::new(),
        [map] if pairs(map).is_some() => pairs(map).unwrap_or_default(),
        [list] => pairs_in("dict", list)?,
        _ => return Err(wrong("dict: expected at most one argument")),
    };
    for name in named.iter().flat_map(|named| named.args().map(str::to_owned).collect::<Vec<_>>()) {
        let item = named.as_ref().map(|named| named.peek::<Value>(&name)).transpose()?;
        all.push((Value::from(name), item.unwrap_or_default()));
    }
    Ok(Value::from_pairs(all))
}
