//! Published schemas match the program's types.

use serde_json::Value;
use std::path::Path;

/// Fails where `docs/schema/{file}` is not `want`, and says how `test` writes it anew.
pub(crate) fn assert_published(file: &str, want: &Value, test: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/schema").join(file);
    if std::env::var_os("MIXFLEET_WRITE_SCHEMA").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, format!("{want:#}\n")).unwrap();
    }
    let published = std::fs::read_to_string(&path).unwrap_or_default();
    let published: Value = serde_json::from_str(&published).unwrap_or_default();
    let hint = format!(
        "docs/schema/{file} is not what the program writes; write it anew with \
         MIXFLEET_WRITE_SCHEMA=1 cargo test -p mixfleet-hwtests --test all {test}::"
    );
    assert!(published == *want, "{hint}");
}
