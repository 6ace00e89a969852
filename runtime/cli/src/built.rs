//! What this program was built from, and how.

use std::sync::LazyLock;

/// The commit, with `-dirty` appended if the tree had uncommitted changes, if the build had it.
pub(crate) const COMMIT: Option<&str> = option_env!("MIXFLEET_COMMIT");

/// Enabled features, beyond the default ones.
pub(crate) fn features() -> Vec<&'static str> {
    let all = [
        ("epp", cfg!(feature = "epp")),
        ("fleet", cfg!(feature = "fleet")),
        ("hwloc", cfg!(feature = "hwloc")),
        ("opencl", cfg!(feature = "opencl")),
        ("otlp", cfg!(feature = "otlp")),
        ("tls", cfg!(feature = "tls")),
        ("verbs", cfg!(feature = "verbs")),
    ];
    all.into_iter().filter(|(_, is_built)| *is_built).map(|(name, _)| name).collect()
}

/// Target and checks of the build.
pub(crate) fn build() -> String {
    let checks = if cfg!(debug_assertions) { ", with debug assertions" } else { "" };
    format!("{} {}{checks}", std::env::consts::ARCH, std::env::consts::OS)
}

/// Version, commit, features and kind of build, for `--version`.
pub(crate) fn version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let commit = COMMIT.unwrap_or("unknown");
        let features = features();
        let features = if features.is_empty() { "the default ones".to_owned() } else { features.join(", ") };
        format!("{}\ncommit: {commit}\nfeatures: {features}\nbuild: {}", env!("CARGO_PKG_VERSION"), build())
    });
    &TEXT
}
