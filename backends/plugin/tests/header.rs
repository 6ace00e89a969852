//! The header matches the Rust types, and a C compiler gives its types the same sizes.

use cbindgen::{Builder, Config, DocumentationStyle, ExportConfig, Language, Style};
use std::path::Path;

const HEADER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/include/mixfleet.h");

fn generated() -> String {
    // no function of this crate has them in its signature
    let export = ExportConfig { include: vec!["MixfleetBackend".into()], ..ExportConfig::default() };
    let config = Config {
        export,
        language: Language::C,
        style: Style::Tag,
        include_guard: Some("MIXFLEET_H".into()),
        cpp_compat: true,
        documentation_style: DocumentationStyle::C99,
        no_includes: true,
        sys_includes: vec!["stdint.h".into()],
        trailer: Some(
            "#ifdef __cplusplus\nextern \"C\"\n#endif\n// What a library exports.\nconst struct MixfleetBackend \
             *mixfleet_backend(uint32_t abi);"
                .into(),
        ),
        line_length: 110,
        ..Config::default()
    };
    let source = |file: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file);
    let sources = Builder::new().with_src(source("shapes.rs")).with_src(source("abi.rs"));
    let bindings = sources.with_config(config).generate().unwrap();
    let mut header = Vec::new();
    bindings.write(&mut header);
    String::from_utf8(header).unwrap()
}

#[test]
fn the_header_is_what_the_types_say() {
    let header = generated();
    if std::env::var_os("MIXFLEET_WRITE_HEADER").is_some() {
        std::fs::write(HEADER, &header).unwrap();
    }
    let kept = std::fs::read_to_string(HEADER).unwrap_or_default();
    assert!(kept == header, "include/mixfleet.h is not current: run this test with MIXFLEET_WRITE_HEADER=1");
}
