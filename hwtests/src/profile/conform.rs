//! Compares a JSON document with its schema, by the keywords that our generated schemas use, and names every
//! field that is missing, wrong or unknown.

use mixfleet_hal::profile::DeviceProfile;
use serde::Serialize;
use serde_json::Value;

/// What a schema says about a document.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Conformance {
    /// Missing or wrong fields, each with its path and the expected type.
    pub errors: Vec<String>,
    /// Paths of fields that the schema does not know, which readers ignore.
    pub unknown: Vec<String>,
}

/// Returns the JSON Schema of a [`DeviceProfile`], as in `docs/schema/device-profile-1.json`.
pub fn device_profile_schema() -> Value {
    schemars::schema_for!(DeviceProfile).to_value()
}

/// Compares `document` with `schema`.
pub fn conform(schema: &Value, document: &Value) -> Conformance {
    let mut walk = Walk { root: schema, found: Conformance::default() };
    walk.value(schema, document, "");
    walk.found
}

struct Walk<'a> {
    root: &'a Value,
    found: Conformance,
}

impl<'a> Walk<'a> {
    /// Follows references to definitions.
    fn resolved(&self, schema: &'a Value) -> &'a Value {
        let reference = schema.get("$ref").and_then(Value::as_str);
        let name = reference.and_then(|reference| reference.strip_prefix("#/$defs/"));
        name.and_then(|name| self.root.get("$defs")?.get(name)).unwrap_or(schema)
    }

    fn value(&mut self, schema: &'a Value, value: &Value, path: &str) {
        let schema = self.resolved(schema);
        if let Some(wanted) = mismatch(schema, value) {
            self.wrong(path, value, &wanted);
            return;
        }
        for keyword in ["anyOf", "oneOf"] {
            if let Some(choices) = schema.get(keyword).and_then(Value::as_array) {
                self.one_of(choices, value, path);
            }
        }
        match value {
            Value::Object(fields) => self.object(schema, fields, path),
            Value::Array(items) => {
                let first =
                    schema.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
                for (at, item) in items.iter().enumerate() {
                    if let Some(schema) = first.get(at).or(schema.get("items")) {
                        self.value(schema, item, &format!("{path}[{at}]"));
                    }
                }
            }
            _ => {}
        }
    }

    fn object(&mut self, schema: &'a Value, fields: &serde_json::Map<String, Value>, path: &str) {
        let inside = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        let known = schema.get("properties").and_then(Value::as_object);
        let known = |name: &str| known.and_then(|known| known.get(name));
        for name in schema.get("required").and_then(Value::as_array).into_iter().flatten() {
            let Some(name) = name.as_str().filter(|name| !fields.contains_key(*name)) else { continue };
            let what =
                known(name).and_then(|of| of.get("description").or(self.resolved(of).get("description")));
            let what = what.and_then(Value::as_str).unwrap_or("see the schema").replace('\n', " ");
            self.found.errors.push(format!("{} is missing; add it: {what}", inside(name)));
        }
        let others = schema.get("additionalProperties");
        for (name, value) in fields {
            match (known(name), others) {
                (Some(schema), _) => self.value(schema, value, &inside(name)),
                (None, Some(of @ Value::Object(_))) => self.value(of, value, &inside(name)),
                (None, Some(Value::Bool(false))) => {
                    self.found
                        .errors
                        .push(format!("{} is not a field of this document; remove it", inside(name)));
                }
                (None, None) if schema.get("properties").is_some() => self.found.unknown.push(inside(name)),
                (None, _) => {}
            }
        }
    }

    /// Takes the first choice that fits; if none does, reports on the one that has the same tag.
    fn one_of(&mut self, choices: &'a [Value], value: &Value, path: &str) {
        let tried = |choice: &'a Value| {
            let mut walk = Walk { root: self.root, found: Conformance::default() };
            walk.value(choice, value, path);
            walk.found
        };
        let same_tag = |choice: &&'a Value| {
            let fields = self.resolved(choice).get("properties").and_then(Value::as_object);
            fields
                .into_iter()
                .flatten()
                .any(|(name, of)| of.get("const").is_some_and(|tag| value.get(name) == Some(tag)))
        };
        let mut results = choices.iter().map(tried);
        match results.find(|found| found.errors.is_empty()) {
            Some(found) => self.found.unknown.extend(found.unknown),
            None => match choices.iter().find(same_tag) {
                Some(choice) => {
                    let found = tried(choice);
                    self.found.errors.extend(found.errors);
                    self.found.unknown.extend(found.unknown);
                }
                None => {
                    let names: Vec<String> = choices.iter().filter_map(|choice| self.named(choice)).collect();
                    self.wrong(path, value, &format!("one of {}", names.join(", ")));
                }
            },
        }
    }

    /// What a choice is called: its constant, its tag, or its type.
    fn named(&self, choice: &'a Value) -> Option<String> {
        let choice = self.resolved(choice);
        let constant = |of: &Value| of.get("const").map(ToString::to_string);
        let mut fields = choice.get("properties").and_then(Value::as_object).into_iter().flatten();
        let tag = fields.find_map(|(name, of)| Some(format!("{name} = {}", constant(of)?)));
        let of_type = || choice.get("type").and_then(Value::as_str).map(str::to_owned);
        constant(choice).or(tag).or_else(of_type)
    }

    fn wrong(&mut self, path: &str, value: &Value, wanted: &str) {
        const SHOWN_MAX: usize = 60;
        let mut shown: String = value.to_string().chars().take(SHOWN_MAX).collect();
        if shown.chars().count() == SHOWN_MAX {
            shown.push_str("...");
        }
        let path = if path.is_empty() { "the document" } else { path };
        self.found.errors.push(format!("{path} is {shown}; expected {wanted}"));
    }
}

/// The expected type, if the value itself, without its fields or items, is not of the schema's type.
fn mismatch(schema: &Value, value: &Value) -> Option<String> {
    let is = |name: &str| match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.is_u64() || value.is_i64(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        _ => true,
    };
    let types: Vec<&str> = match schema.get("type") {
        Some(Value::String(name)) => vec![name],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    if !types.is_empty() && !types.iter().any(|name| is(name)) {
        return Some(format!("a value of type {}", types.join(" or ")));
    }
    if let Some(constant) = schema.get("const").filter(|constant| *constant != value) {
        return Some(constant.to_string());
    }
    if let Some(allowed) = schema.get("enum").and_then(Value::as_array).filter(|all| !all.contains(value)) {
        let allowed: Vec<String> = allowed.iter().map(ToString::to_string).collect();
        return Some(format!("one of {}", allowed.join(", ")));
    }
    let least = schema.get("minimum").and_then(Value::as_f64).unwrap_or(f64::NEG_INFINITY);
    let most = match schema.get("format").and_then(Value::as_str) {
        Some("uint32") => f64::from(u32::MAX),
        _ => f64::INFINITY,
    };
    let length = |limit: &str| schema.get(limit).and_then(Value::as_u64);
    match value {
        Value::Number(number) if !(least..=most).contains(&number.as_f64().unwrap_or(f64::NAN)) => {
            Some(format!("a number from {least} to {most}"))
        }
        Value::Array(items) => {
            let count = items.len() as u64;
            let fits = length("minItems").is_none_or(|least| count >= least)
                && length("maxItems").is_none_or(|most| count <= most);
            (!fits)
                .then(|| format!("{} items", length("minItems").or(length("maxItems")).unwrap_or_default()))
        }
        _ => None,
    }
}
