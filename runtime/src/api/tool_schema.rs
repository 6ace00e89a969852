//! Schemas of tool arguments: types of values written as text, and grammars of calls.

use serde_json::{Map, Value};

/// Maximum number of references that lead to a schema.
const REFERENCES_MAX: usize = 16;

/// Converts `text` to the value that the schema of the argument `key` expects: it stays a string where the
/// schema allows strings, or no other type fits.
pub(super) fn typed(schema: &Value, key: &str, text: &str) -> Value {
    let of = resolved(schema, &schema["properties"][key]);
    let mut kinds = Vec::new();
    collect_kinds(schema, of, &mut kinds, 0);
    let trimmed = text.trim();
    let python = match trimmed {
        "True" => Some(Value::Bool(true)),
        "False" => Some(Value::Bool(false)),
        "None" => Some(Value::Null),
        _ => None,
    };
    let value = python.or_else(|| serde_json::from_str::<Value>(trimmed).ok());
    let Some(value) = value else { return Value::from(text) };
    let fits = |kind: &&str| match (*kind, &value) {
        ("integer", Value::Number(number)) => number.is_i64() || number.is_u64(),
        ("number", Value::Number(_))
        | ("boolean", Value::Bool(_))
        | ("null", Value::Null)
        | ("array", Value::Array(_))
        | ("object", Value::Object(_)) => true,
        _ => false,
    };
    let is_text = kinds.contains(&"string");
    // a value of another type is still not a string where the schema has no strings
    match kinds.iter().any(fits) || !is_text && !value.is_string() {
        true => value,
        false => Value::from(text),
    }
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

/// One argument of a function: name, schema with the definitions that it may refer to, and whether it is
/// required.
pub(super) struct Argument {
    pub(super) name: String,
    pub(super) schema: Value,
    pub(super) is_required: bool,
    /// Whether it can only be a string.
    pub(super) is_text: bool,
}

/// The arguments that a schema names, required ones first.
pub(super) fn arguments(schema: &Value) -> Vec<Argument> {
    let root = resolved(schema, schema);
    let required: Vec<&str> =
        root["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut found: Vec<Argument> = Vec::new();
    for (name, of) in root["properties"].as_object().into_iter().flatten() {
        let mut kinds = Vec::new();
        collect_kinds(schema, resolved(schema, of), &mut kinds, 0);
        let is_text =
            !kinds.is_empty() && kinds.iter().all(|kind| *kind == "string") && of.get("enum").is_none();
        let mut own = of.clone();
        // a reference to the whole schema, rather than to a definition, allows any value
        let refers = |to: &str| own.to_string().contains(&format!("\"$ref\":\"#{to}"));
        if refers("\"") || refers("/properties") {
            own = Value::Object(Map::new());
        }
        if let Value::Object(own) = &mut own {
            for definitions in ["$defs", "definitions"] {
                let known = schema.get(definitions).filter(|_| !own.contains_key(definitions)).cloned();
                own.extend(known.map(|known| (definitions.to_owned(), known)));
            }
        }
        let is_required = required.contains(&name.as_str());
        found.push(Argument { name: name.clone(), schema: own, is_required, is_text });
    }
    found.sort_by_key(|argument| !argument.is_required);
    found
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
            "pick": {"enum": ["1", "2"]}},
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
            ("unknown", "[1]", json!([1])),
        ] {
            assert_eq!(typed(&schema, key, text), value, "{key}: {text}");
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
