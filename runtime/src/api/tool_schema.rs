//! Schemas of tool arguments: types of values written as text, and grammars of calls.

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::python_calls;

/// Maximum number of references that lead to a schema.
const REFERENCES_MAX: usize = 16;

/// Converts `text` to the JSON that the schema of the argument `key` expects: a string where the schema
/// allows strings, or where no other type fits. Other JSON keeps its text, so numbers keep their digits.
pub(super) fn typed(schema: &Value, key: &str, text: &str) -> String {
    let of = resolved(schema, argument_schema(schema, key));
    let trimmed = text.trim();
    let parsed = serde_json::from_str::<Value>(trimmed).ok();
    let mut constants = Vec::new();
    collect_constants(schema, of, &mut constants, 0);
    let as_text = constants.iter().find(|constant| constant.as_str() == Some(text));
    let as_json = || constants.iter().find(|constant| Some(**constant) == parsed.as_ref());
    if let Some(constant) = as_text.or_else(as_json) {
        return constant.to_string();
    }
    let mut kinds = Vec::new();
    collect_kinds(schema, of, &mut kinds, 0);
    let wants = |kind: &str| kinds.contains(&kind);
    let python = match trimmed {
        "True" => Some(Value::Bool(true)),
        "False" => Some(Value::Bool(false)),
        "None" => Some(Value::Null),
        _ if trimmed.starts_with('{') && wants("object") || trimmed.starts_with('[') && wants("array") => {
            python_calls::value(trimmed)
        }
        _ => None,
    };
    let json = match (is_json(trimmed), python) {
        (true, _) => trimmed.to_owned(),
        (false, Some(value)) => value.to_string(),
        (false, None) => return Value::from(text).to_string(),
    };
    let kind = match json.as_bytes().first() {
        Some(b'"') => "string",
        Some(b'{') => "object",
        Some(b'[') => "array",
        Some(b't' | b'f') => "boolean",
        Some(b'n') => "null",
        _ if json.contains(['.', 'e', 'E']) => "number",
        _ => "integer",
    };
    let fits = kind != "string" && (wants(kind) || kind == "integer" && wants("number"));
    // a value of another type is still not a string where the schema has no strings
    match fits || kind != "string" && !wants("string") {
        true => json,
        false => Value::from(text).to_string(),
    }
}

/// Whether a text is JSON. Its numbers may exceed every machine type.
fn is_json(text: &str) -> bool {
    serde_json::from_str::<&RawValue>(text).is_ok()
}

/// The schema of an argument: its own, or that of further arguments.
fn argument_schema<'a>(schema: &'a Value, key: &str) -> &'a Value {
    let root = resolved(schema, schema);
    let parts = root["allOf"].as_array().into_iter().flatten().map(|part| resolved(schema, part));
    let own = [root].into_iter().chain(parts).find_map(|part| part["properties"].get(key));
    own.unwrap_or(&root["additionalProperties"])
}

/// The schema that a reference points to.
fn resolved<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
    let mut found = schema;
    for _ in 0..REFERENCES_MAX {
        let Some(path) = found["$ref"].as_str().and_then(|path| path.strip_prefix('#')) else { break };
        let Some(next) = root.pointer(path) else { break };
        found = next;
    }
    found
}

/// The types that a schema allows, as far as it names them.
fn collect_kinds<'a>(root: &'a Value, schema: &'a Value, kinds: &mut Vec<&'a str>, depth: usize) {
    match &schema["type"] {
        Value::String(kind) => kinds.push(kind),
        Value::Array(several) => kinds.extend(several.iter().filter_map(Value::as_str)),
        _ => {}
    }
    let constants = schema["enum"].as_array().into_iter().flatten().chain(schema.get("const"));
    kinds.extend(constants.filter(|constant| constant.is_string()).map(|_| "string"));
    if depth < REFERENCES_MAX {
        for several in ["anyOf", "oneOf", "allOf"] {
            for one in schema[several].as_array().into_iter().flatten() {
                collect_kinds(root, resolved(root, one), kinds, depth + 1);
            }
        }
    }
}

/// The schema restricted to objects; none if no object fits it.
pub(super) fn of_objects(schema: &Value) -> Option<Value> {
    let Value::Object(map) = schema else { return None };
    let is_object = match &map.get("type") {
        None => false,
        Some(Value::String(kind)) if kind == "object" => true,
        Some(Value::Array(kinds)) if kinds.iter().any(|kind| kind == "object") => false,
        Some(_) => return None,
    };
    if is_object {
        return Some(schema.clone());
    }
    let mut all: Map<String, Value> = map.clone();
    all.insert("type".into(), "object".into());
    Some(Value::Object(all))
}

/// The values that a schema enumerates.
fn collect_constants<'a>(root: &'a Value, schema: &'a Value, constants: &mut Vec<&'a Value>, depth: usize) {
    constants.extend(schema["enum"].as_array().into_iter().flatten().chain(schema.get("const")));
    if depth < REFERENCES_MAX {
        for several in ["anyOf", "oneOf", "allOf"] {
            for one in schema[several].as_array().into_iter().flatten() {
                collect_constants(root, resolved(root, one), constants, depth + 1);
            }
        }
    }
}

/// A way to write a value in a style without quotes around text.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum WrittenForm {
    /// Any text that matches these regular expressions.
    Text(Vec<String>),
    /// This text.
    Constant(String),
    /// JSON of this schema.
    Json(Value),
}

/// One argument of a function: name, schema with the definitions that it may refer to, whether it is
/// required, whether it can only be a string, and the ways to write it as text.
pub(super) struct Argument {
    pub(super) name: String,
    pub(super) schema: Value,
    pub(super) is_required: bool,
    pub(super) is_text: bool,
    pub(super) forms: Vec<WrittenForm>,
}

/// The arguments that a schema names, required ones first.
pub(super) fn arguments(schema: &Value) -> Vec<Argument> {
    let root = resolved(schema, schema);
    let required: Vec<&str> =
        root["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let named = root["properties"].as_object().into_iter().flatten().map(|(name, _)| name.as_str());
    let mut names: Vec<&str> = named.collect();
    let further: Vec<&str> = required.iter().filter(|name| !names.contains(name)).copied().collect();
    names.extend(further);
    let mut found: Vec<Argument> = names
        .into_iter()
        .map(|name| {
            let own = argument_schema(schema, name);
            let (forms, mut kinds) = (written_forms(schema, own, 0), Vec::new());
            collect_kinds(schema, resolved(schema, own), &mut kinds, 0);
            let is_text = !kinds.is_empty() && forms.iter().all(|form| matches!(form, WrittenForm::Text(_)));
            Argument {
                name: name.to_owned(),
                schema: standing_alone(schema, own),
                is_required: required.contains(&name),
                is_text: is_text && kinds.iter().all(|kind| *kind == "string"),
                forms,
            }
        })
        .collect();
    found.sort_by_key(|argument| !argument.is_required);
    found
}

/// A part of a schema with the definitions that it may refer to.
fn standing_alone(root: &Value, part: &Value) -> Value {
    /// Name of the definition that stands for the whole schema.
    const WHOLE: &str = "whole-schema";
    fn rebase(value: &mut Value, refers: &mut bool) {
        match value {
            Value::Array(items) => items.iter_mut().for_each(|item| rebase(item, refers)),
            Value::Object(map) => {
                if let Some(Value::String(path)) = map.get_mut("$ref")
                    && let Some(inner) = path.strip_prefix('#')
                    && !inner.starts_with("/$defs/")
                    && !inner.starts_with("/definitions/")
                {
                    *path = format!("#/$defs/{WHOLE}{inner}");
                    *refers = true;
                }
                map.values_mut().for_each(|item| rebase(item, refers));
            }
            _ => {}
        }
    }
    let (mut own, mut refers) = (part.clone(), false);
    rebase(&mut own, &mut refers);
    let Value::Object(map) = &mut own else { return json!({}) };
    for definitions in ["$defs", "definitions"] {
        let known = root.get(definitions).filter(|_| !map.contains_key(definitions)).cloned();
        map.extend(known.map(|mut known| {
            rebase(&mut known, &mut refers);
            (definitions.to_owned(), known)
        }));
    }
    if refers {
        let mut whole = root.clone();
        if let Value::Object(whole) = &mut whole {
            whole.retain(|key, _| key != "$defs" && key != "definitions");
        }
        rebase(&mut whole, &mut refers);
        let definitions = map.entry("$defs").or_insert_with(|| json!({}));
        definitions.as_object_mut().into_iter().for_each(|all| drop(all.insert(WHOLE.into(), whole.clone())));
    }
    own
}

/// The ways to write a value of a schema as text.
fn written_forms(root: &Value, part: &Value, depth: usize) -> Vec<WrittenForm> {
    let of = resolved(root, part);
    let constants: Vec<&Value> = of["enum"].as_array().into_iter().flatten().chain(of.get("const")).collect();
    if !constants.is_empty() {
        let written = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        return constants.into_iter().map(|value| WrittenForm::Constant(written(value))).collect();
    }
    let several = ["anyOf", "oneOf"].iter().find_map(|key| of[*key].as_array());
    let mut forms = Vec::new();
    if let Some(several) = several.filter(|_| of.get("type").is_none() && depth < REFERENCES_MAX) {
        forms.extend(several.iter().flat_map(|one| written_forms(root, one, depth + 1)));
    } else {
        let mut kinds = Vec::new();
        collect_kinds(root, of, &mut kinds, 0);
        let others: Vec<&str> = kinds.iter().filter(|kind| **kind != "string").copied().collect();
        if others.len() < kinds.len() || kinds.is_empty() {
            let mut limits = Vec::new();
            collect_limits(root, of, &mut limits, 0);
            forms.push(WrittenForm::Text(limits));
        }
        if !others.is_empty() {
            let mut schema = standing_alone(root, part);
            if others.len() < kinds.len() {
                schema = standing_alone(root, of);
                schema["type"] = json!(others);
            }
            forms.push(WrittenForm::Json(schema));
        }
    }
    let any = WrittenForm::Text(Vec::new());
    if forms.contains(&any) || forms.is_empty() { vec![any] } else { forms }
}

/// The limits of a text as regular expressions in Lark's format.
fn collect_limits(root: &Value, schema: &Value, limits: &mut Vec<String>, depth: usize) {
    let (least, most) = (schema["minLength"].as_u64(), schema["maxLength"].as_u64());
    if least.is_some() || most.is_some() {
        let most = most.map_or_else(String::new, |most| most.to_string());
        limits.push(format!("/(?s:.{{{},{most}}})/", least.unwrap_or(0)));
    }
    limits.extend(schema["pattern"].as_str().map(searched));
    if depth < REFERENCES_MAX {
        for one in schema["allOf"].as_array().into_iter().flatten() {
            collect_limits(root, resolved(root, one), limits, depth + 1);
        }
    }
}

/// A regular expression for whole texts in which `pattern` is found, in Lark's format. Anchors that do not
/// bind the whole pattern stay, and the grammar is refused.
fn searched(pattern: &str) -> String {
    let (mut written, mut escaped, mut depth, mut in_class, mut divides) =
        (String::new(), false, 0, false, false);
    for letter in pattern.chars() {
        match letter {
            _ if escaped => {}
            '[' => in_class = true,
            ']' => in_class = false,
            '(' if !in_class => depth += 1,
            ')' if !in_class => depth -= 1,
            '|' if !in_class => divides |= depth == 0,
            _ => {}
        }
        match letter {
            '/' if !escaped => written.push_str("\\/"),
            '\n' => written.push_str("\\n"),
            letter => written.push(letter),
        }
        escaped = letter == '\\' && !escaped;
    }
    let begun = written.strip_prefix('^').filter(|_| !divides);
    let inner = begun.unwrap_or(&written);
    let is_escaped =
        inner.strip_suffix('$').is_some_and(|rest| (rest.len() - rest.trim_end_matches('\\').len()) % 2 == 1);
    let ended = inner.strip_suffix('$').filter(|_| !divides && !is_escaped);
    let any = "(?s:.*)";
    let (before, after) = (begun.map_or(any, |_| ""), ended.map_or(any, |_| ""));
    format!("/{before}({}){after}/", ended.unwrap_or(inner))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_text_is_what_its_schema_says() {
        let schema = json!({"properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "any": {}, "maybe": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "number"}, {"type": "string"}]}, "deep": {"$ref": "#/$defs/Deep"},
            "pick": {"enum": ["1", "2"]}, "mixed": {"enum": ["x", 2]}, "list": {"type": "array"}},
            "$defs": {"Deep": {"type": "object"}}});
        for (key, text, value) in [
            ("city", "12", json!("12")),
            ("city", "{\"a\": 1}", json!("{\"a\": 1}")),
            ("days", " 12\n", json!(12)),
            ("days", "many", json!("many")),
            ("any", "12", json!(12)),
            ("any", "True", json!(true)),
            ("any", "a b", json!("a b")),
            ("maybe", "null", Value::Null),
            ("maybe", "12", json!("12")),
            ("either", "1.5", json!(1.5)),
            ("deep", "{\"z\": 1, \"a\": 2}", json!({"z": 1, "a": 2})),
            ("pick", "1", json!("1")),
            ("pick", "\"2\"", json!("2")),
            ("mixed", "2", json!(2)),
            ("mixed", "x", json!("x")),
            ("list", "[1, 'a', True]", json!([1, "a", true])),
            ("unknown", "[1]", json!([1])),
        ] {
            let read: Value = serde_json::from_str(&typed(&schema, key, text)).unwrap();
            assert_eq!(read, value, "{key}: {text}");
        }
    }

    #[test]
    fn values_keep_their_digits_and_roots_may_be_references() {
        let digits = "123456789012345678901234567890";
        assert_eq!(typed(&json!({"properties": {"a": {"type": "integer"}}}), "a", digits), digits);
        let schema =
            json!({"$ref": "#/$defs/R", "$defs": {"R": {"properties": {"zip": {"type": "string"}}}}});
        assert_eq!(typed(&schema, "zip", "8001"), "\"8001\"");
        let schema = json!({"type": "object", "additionalProperties": {"type": "string"}});
        assert_eq!(typed(&schema, "zip", "8001"), "\"8001\"");
    }

    #[test]
    fn written_forms_follow_the_schema() {
        let forms = |schema: Value| written_forms(&schema, &schema, 0);
        let text =
            |limits: &[&str]| WrittenForm::Text(limits.iter().map(|&limit| limit.to_owned()).collect());
        let constant = |text: &str| WrittenForm::Constant(text.into());
        assert_eq!(forms(json!({})), [text(&[])]);
        assert_eq!(forms(json!({"enum": ["a", 1, null]})), [constant("a"), constant("1"), constant("null")]);
        assert_eq!(forms(json!({"type": "string", "maxLength": 3})), [text(&["/(?s:.{0,3})/"])]);
        assert_eq!(forms(json!({"anyOf": [{"type": "string"}, {"type": "null"}]})), [text(&[])]);
        let either = forms(json!({"type": ["string", "null"], "pattern": "^a"}));
        assert_eq!(either[0], text(&["/(a)(?s:.*)/"]));
        assert!(
            matches!(&either[1], WrittenForm::Json(schema) if schema["type"] == json!(["null"])),
            "{either:?}"
        );
        for (pattern, expected) in [
            ("^a/b$", "/(a\\/b)/"),
            ("a$", "/(?s:.*)(a)/"),
            ("^(a|b)$", "/((a|b))/"),
            ("^a|b$", "/(?s:.*)(^a|b$)(?s:.*)/"),
            ("a\\$", "/(?s:.*)(a\\$)(?s:.*)/"),
        ] {
            assert_eq!(searched(pattern), expected);
        }
    }

    #[test]
    fn only_objects_are_arguments() {
        assert_eq!(of_objects(&json!({})), Some(json!({"type": "object"})));
        assert_eq!(of_objects(&json!({"properties": {"a": {}}})).unwrap()["type"], "object");
        assert_eq!(of_objects(&json!({"type": ["object", "null"]})).unwrap()["type"], "object");
        assert_eq!(of_objects(&json!({"type": "string"})), None);
        let schema = json!({"properties": {"b": {"$ref": "#/$defs/A"}, "a": {"type": "string"}}, "required": ["a"],
            "$defs": {"A": {"enum": ["q"]}}});
        let found = arguments(&schema);
        assert_eq!(found.iter().map(|argument| argument.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert!(found[0].is_text && found[0].is_required && !found[1].is_required);
        assert_eq!(found[1].schema["$defs"]["A"], json!({"enum": ["q"]}));
    }
}
