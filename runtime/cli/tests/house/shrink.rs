//! Lists of exceptions that only shrink.

use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Returns a message for each count that differs from its row in the table named `list`. A key without a row
/// has none allowed; `advice` says what to do about one too many.
pub(super) fn differences(
    found: &BTreeMap<String, usize>,
    table: &[(&str, usize)],
    list: &str,
    advice: &str,
) -> Vec<String> {
    let allowed: BTreeMap<&str, usize> = table.iter().copied().collect();
    let mut messages = Vec::new();
    if allowed.len() < table.len() || !table.is_sorted() {
        messages.push(format!("{list} is not sorted, or has two rows for one key"));
    }
    let keys: std::collections::BTreeSet<&str> =
        found.keys().map(String::as_str).chain(allowed.keys().copied()).collect();
    for key in keys {
        let (count, row) = (found.get(key).copied().unwrap_or(0), allowed.get(key).copied().unwrap_or(0));
        match count.cmp(&row) {
            Ordering::Equal => {}
            Ordering::Greater => messages.push(format!("{key}: {count}, and {list} has {row}: {advice}")),
            Ordering::Less if count == 0 => messages.push(format!("{key}: take its row out of {list}")),
            Ordering::Less => messages.push(format!("{key}: lower its row in {list} from {row} to {count}")),
        }
    }
    messages
}

#[test]
fn lists_of_exceptions_only_shrink() {
    let found: BTreeMap<String, usize> =
        [("a", 2), ("b", 1)].map(|(key, count)| (key.to_owned(), count)).into();
    let messages = |table: &[(&str, usize)]| differences(&found, table, "LIST", "rename one").join("\n");
    assert_eq!(messages(&[("a", 2), ("b", 1)]), "");
    assert_eq!(messages(&[("a", 1), ("b", 1)]), "a: 2, and LIST has 1: rename one");
    assert_eq!(messages(&[("a", 2)]), "b: 1, and LIST has 0: rename one");
    assert_eq!(messages(&[("a", 3), ("b", 1)]), "a: lower its row in LIST from 3 to 2");
    assert_eq!(messages(&[("a", 2), ("b", 1), ("c", 1)]), "c: take its row out of LIST");
    assert!(messages(&[("b", 1), ("a", 2)]).contains("not sorted"));
    assert!(messages(&[("a", 2), ("a", 2), ("b", 1)]).contains("two rows"));
}
