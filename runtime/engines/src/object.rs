//! A JSON object whose values stay text: some are replaced, and all others keep their exact form.

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// The fields of an object in their order. Of fields with one name the last one counts, as with most parsers.
#[derive(Clone, Debug, Default)]
pub(crate) struct RawObject<'a>(Vec<(Cow<'a, str>, Cow<'a, RawValue>)>);

impl<'a> RawObject<'a> {
    /// The fields of `text`, an object.
    pub(crate) fn parse(text: &'a [u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(text)
    }

    /// Names of the fields.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| &**name)
    }

    /// A field's text.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.get())
    }

    /// The text of a field that is neither absent nor null.
    pub(crate) fn given(&self, name: &str) -> Option<&str> {
        self.get(name).filter(|text| *text != "null")
    }

    /// A field's value; none if it is absent, null or of another type.
    pub(crate) fn read<T: for<'d> Deserialize<'d>>(&self, name: &str) -> Option<T> {
        serde_json::from_str(self.given(name)?).ok()
    }

    /// Replaces a field, or adds it at the end.
    pub(crate) fn set(&mut self, name: &'static str, value: &impl serde::Serialize) {
        let value = serde_json::value::to_raw_value(value).expect("plain data");
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, old)) => *old = Cow::Owned(value),
            None => self.0.push((name.into(), Cow::Owned(value))),
        }
    }

    /// Removes a field, if it is there.
    pub(crate) fn remove(&mut self, name: &str) {
        self.0.retain(|(known, _)| known != name);
    }

    /// Removes all fields but these.
    pub(crate) fn keep(&mut self, names: &[&str]) {
        self.0.retain(|(known, _)| names.contains(&&**known));
    }

    /// Removes all fields but those whose names `stays` says yes to.
    pub(crate) fn retain(&mut self, mut stays: impl FnMut(&str) -> bool) {
        self.0.retain(|(known, _)| stays(known));
    }

    /// The object as JSON.
    pub(crate) fn write(&self) -> Vec<u8> {
        let bytes = self.0.iter().map(|(name, value)| name.len() + value.get().len() + 4).sum::<usize>();
        let mut text = Vec::with_capacity(bytes + 2);
        text.push(b'{');
        for (at, (name, value)) in self.0.iter().enumerate() {
            if at > 0 {
                text.push(b',');
            }
            serde_json::to_writer(&mut text, name).expect("memory takes everything");
            text.push(b':');
            text.extend_from_slice(value.get().as_bytes());
        }
        text.push(b'}');
        text
    }
}

/// A borrowed name where it has no escapes.
#[derive(Deserialize)]
#[serde(transparent)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for RawObject<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;
        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = RawObject<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields: Vec<(Cow<'de, str>, Cow<'de, RawValue>)> = Vec::new();
                while let Some((Name(name), value)) = map.next_entry::<Name<'de>, &'de RawValue>()? {
                    if fields.len() == FIELDS_MAX {
                        return Err(A::Error::custom(format!("an object has more than {FIELDS_MAX} fields")));
                    }
                    match fields.iter_mut().find(|(known, _)| *known == name) {
                        Some((_, old)) => *old = Cow::Borrowed(value),
                        None => fields.push((name, Cow::Borrowed(value))),
                    }
                }
                Ok(RawObject(fields))
            }
        }
        deserializer.deserialize_map(FieldsVisitor)
    }
}

/// Maximum number of fields; fewer than a hundred are known.
const FIELDS_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_replaced_stays_as_it_was() {
        let text = br#"{ "model":"a", "x\u0041": [1, 2.50,  {"b":null}], "stream" :true,"model":"b"}"#;
        let mut object = RawObject::parse(text).unwrap();
        assert_eq!(object.read::<String>("model").as_deref(), Some("b"));
        object.set("model", &"c");
        object.set("more", &7);
        let written = String::from_utf8(object.write()).unwrap();
        assert_eq!(written, r#"{"model":"c","xA":[1, 2.50,  {"b":null}],"stream":true,"more":7}"#);
    }

    #[test]
    fn what_is_no_object_or_has_too_many_fields_is_refused() {
        for text in ["[]", "7", "{\"a\":1", "{\"a\":1}x", "", "null"] {
            assert!(RawObject::parse(text.as_bytes()).is_err(), "{text}");
        }
        let many: Vec<String> = (0..=FIELDS_MAX).map(|at| format!("\"{at}\":0")).collect();
        assert!(RawObject::parse(format!("{{{}}}", many.join(",")).as_bytes()).is_err());
    }
}
