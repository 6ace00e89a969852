//! Binds the arguments of filters and methods to names, as Python does.

use super::wrong;
use minijinja::value::{Kwargs, Rest, ValueOrKwargs};
use minijinja::{Error, Value};

/// The arguments of a filter after its value.
pub(super) type Given = Rest<ValueOrKwargs>;

/// The values of the parameters `names`, in their order.
pub(super) fn bind<const N: usize>(
    what: &str,
    given: &[Value],
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    let mut bound = [const { None }; N];
    let (named, positional) = split(given);
    if positional.len() > N {
        return Err(wrong(format!("{what}: expected at most {N} arguments, not {}", positional.len())));
    }
    for (slot, value) in bound.iter_mut().zip(positional) {
        *slot = Some(value.clone());
    }
    if let Some(named) = named {
        for name in named.args() {
            let at = names.iter().position(|known| *known == name);
            let slot = at.map(|at| &mut bound[at]).filter(|slot| slot.is_none());
            let slot = slot.ok_or_else(|| wrong(format!("{what}: unknown or repeated argument '{name}'")))?;
            *slot = Some(named.peek::<Value>(name)?);
        }
    }
    Ok(bound)
}

/// Named and positional arguments.
pub(super) fn split(given: &[Value]) -> (Option<Kwargs>, &[Value]) {
    match given.split_last() {
        Some((last, others)) if last.is_kwargs() => (Kwargs::try_from(last.clone()).ok(), others),
        _ => (None, given),
    }
}

/// A text argument, or `default` where there is none.
pub(super) fn text_or<'a>(what: &str, value: &'a Option<Value>, default: &'a str) -> Result<&'a str, Error> {
    match value {
        None => Ok(default),
        Some(value) => {
            value.as_str().ok_or_else(|| wrong(format!("{what}: expected a text, not {}", value.kind())))
        }
    }
}

/// An integer argument, or none where there is none or `none`.
pub(super) fn integer(what: &str, value: &Option<Value>) -> Result<Option<i64>, Error> {
    match value.as_ref().filter(|value| !value.is_none()) {
        None => Ok(None),
        Some(value) => i64::try_from(value.clone())
            .map(Some)
            .map_err(|_| wrong(format!("{what}: expected an integer, not {}", value.kind()))),
    }
}

/// Whether an argument is true in Python's sense.
pub(super) fn truth(value: &Option<Value>, default: bool) -> bool {
    value.as_ref().map_or(default, Value::is_true)
}
