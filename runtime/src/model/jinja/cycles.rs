//! `cycler` and `joiner`: values that change when they are called.

use super::wrong;
use minijinja::value::{Object, ObjectRepr, Rest};
use minijinja::{Environment, Error, State, Value};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(super) fn add(environment: &mut Environment<'_>) {
    environment.add_function("cycler", |items: Rest<Value>| -> Result<Value, Error> {
        match items.is_empty() {
            true => Err(wrong("cycler: expected items")),
            false => Ok(Value::from_object(Cycler { items: items.0, at: AtomicUsize::new(0) })),
        }
    });
    environment.add_function("joiner", |between: Option<Value>| {
        let between = between.unwrap_or(Value::from(", "));
        Value::from_object(Joiner { between, calls: AtomicUsize::new(0) })
    });
}

/// Returns its items in turn, endlessly.
#[derive(Debug)]
struct Cycler {
    items: Vec<Value>,
    at: AtomicUsize,
}

impl Cycler {
    fn item(&self, at: usize) -> Value {
        self.items.get(at % self.items.len()).cloned().unwrap_or_default()
    }
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        (key.as_str() == Some("current")).then(|| self.item(self.at.load(Ordering::Relaxed)))
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        method: &str,
        _: &[Value],
    ) -> Result<Value, Error> {
        match method {
            "next" => Ok(self.item(self.at.fetch_add(1, Ordering::Relaxed))),
            "reset" => {
                self.at.store(0, Ordering::Relaxed);
                Ok(Value::from(()))
            }
            _ => Err(Error::from(minijinja::ErrorKind::UnknownMethod)),
        }
    }
}

/// Returns an empty text first, and then the separator.
#[derive(Debug)]
struct Joiner {
    between: Value,
    calls: AtomicUsize,
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, _: &[Value]) -> Result<Value, Error> {
        let is_first = self.calls.fetch_add(1, Ordering::Relaxed) == 0;
        Ok(if is_first { Value::from("") } else { self.between.clone() })
    }
}
