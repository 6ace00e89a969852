//! Finds the checkpoint that a name means: a path, a repository of the Hugging Face Hub that is in the Hub's
//! cache on this machine, or a known model by its name here. Nothing is downloaded.

use crate::failure::UsageError;
use mixfleet_scheduler::models::find;
use std::path::{Path, PathBuf};

/// A checkpoint on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Located {
    pub(crate) path: PathBuf,
    /// What to call it, where its folder's name says nothing.
    pub(crate) name: Option<String>,
}

/// Where a name's checkpoint is: that of `NAME`, of `NAME@REVISION`, or a path.
///
/// # Errors
/// When the name is that of a repository or known model that is not on this machine; the message has the
/// command that fetches it.
pub(crate) fn located(given: &Path) -> Result<Located, UsageError> {
    located_in(given, cache().as_deref())
}

fn located_in(given: &Path, cache: Option<&Path>) -> Result<Located, UsageError> {
    let as_given = || Located { path: given.to_owned(), name: None };
    if given.exists() {
        let folder = given.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        return match folder.strip_prefix("models--").and_then(|_| snapshot(given, None)) {
            Some(path) => Ok(Located { path, name: folder.rsplit("--").next().map(str::to_owned) }),
            None => Ok(as_given()),
        };
    }
    let Some(text) = given.to_str().filter(|text| !text.starts_with(['.', '/', '~'])) else {
        return Ok(as_given());
    };
    let (name, revision) = match text.split_once('@') {
        Some((name, revision)) => (name, Some(revision)),
        None => (text, None),
    };
    let repository = match name.split('/').collect::<Vec<_>>().as_slice() {
        [owner, model] if !owner.is_empty() && !model.is_empty() => name.to_owned(),
        [_] => match find(name) {
            Ok(known) if known.name.eq_ignore_ascii_case(name) => known.repository.to_owned(),
            // a tuned version has the shape of another model, and not its weights
            Ok(known) => {
                let (known, repository) = (known.name, known.repository);
                return Err(UsageError(format!(
                    "there is no directory {name}: name a repository as OWNER/{name}, or {known} for {repository}"
                )));
            }
            Err(_) if given.extension().is_some() => return Ok(as_given()),
            Err(error) => {
                return Err(UsageError(format!("there is no directory {name} and no such model: {error}")));
            }
        },
        _ => return Ok(as_given()),
    };
    let cached = cache.map(|cache| cache.join(format!("models--{}", repository.replace('/', "--"))));
    if let Some(path) = cached.and_then(|folder| snapshot(&folder, revision)) {
        let name = repository.rsplit('/').next().map(str::to_owned);
        return Ok(Located { path, name });
    }
    let of_revision = revision.map(|revision| format!(" --revision {revision}")).unwrap_or_default();
    let place = cache.map_or_else(|| "its cache".to_owned(), |cache| cache.display().to_string());
    Err(UsageError(format!(
        "there is no directory {text}, and {repository} is not in {place}: nothing is downloaded here; fetch it with \
         'hf download {repository}{of_revision}' and start again"
    )))
}

/// The Hub's cache: `HF_HUB_CACHE`, else `hub` in `HF_HOME`, else `huggingface/hub` in the user's cache.
fn cache() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("HF_HUB_CACHE").or_else(|| variable("HF_HOME").map(|home| home.join("hub"))).or_else(|| {
        let caches = variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
        caches.map(|caches| caches.join("huggingface/hub"))
    })
}

/// The files of a repository in the cache at a revision: a branch, tag or commit; `main` unless one is named.
fn snapshot(repository: &Path, revision: Option<&str>) -> Option<PathBuf> {
    let snapshots = repository.join("snapshots");
    let wanted = revision.unwrap_or("main");
    if wanted.contains("..") {
        return None;
    }
    let commit = std::fs::read_to_string(repository.join("refs").join(wanted)).ok();
    let named = commit.map(|commit| snapshots.join(commit.trim()));
    let by_commit = || Some(snapshots.join(wanted)).filter(|path| path.is_dir());
    let only = || {
        let mut all = std::fs::read_dir(&snapshots).ok()?.flatten();
        let first = all.next()?;
        (revision.is_none() && all.next().is_none()).then(|| first.path())
    };
    named.filter(|path| path.is_dir()).or_else(by_commit).or_else(only)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository(cache: &Path, id: &str, branch: &str, commit: &str) -> PathBuf {
        let folder = cache.join(format!("models--{}", id.replace('/', "--")));
        let snapshot = folder.join("snapshots").join(commit);
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(folder.join("refs")).unwrap();
        std::fs::write(folder.join("refs").join(branch), commit).unwrap();
        snapshot
    }

    #[test]
    fn names_find_what_the_cache_has_and_say_how_to_fetch_the_rest() {
        let cache = std::env::temp_dir().join(format!("mixfleet-hub-{}", std::process::id()));
        let first = repository(&cache, "someone/a-model", "main", "0123abc");
        let second = repository(&cache, "someone/a-model", "v2", "4567def");
        let in_cache = |name: &str| located_in(Path::new(name), Some(&cache));
        let path_of = |name: &str| in_cache(name).unwrap().path;
        assert_eq!(path_of("someone/a-model"), first);
        assert_eq!(path_of("someone/a-model@v2"), second);
        assert_eq!(path_of("someone/a-model@4567def"), second);
        assert_eq!(in_cache("someone/a-model").unwrap().name.as_deref(), Some("a-model"));
        let folder = cache.join("models--someone--a-model");
        assert_eq!(located_in(&folder, None).unwrap().path, first);
        let missing = in_cache("someone/another@v1").unwrap_err().0;
        assert!(missing.contains("'hf download someone/another --revision v1'"), "{missing}");
        let known = in_cache("llama-3.1-8b").unwrap_err().0;
        assert!(known.contains("'hf download "), "{known}");
        let tuned = in_cache("Llama-3.1-8B-Instruct").unwrap_err().0;
        assert!(tuned.contains("OWNER/Llama-3.1-8B-Instruct"), "{tuned}");
        let unknown = in_cache("no-such-model-at-all").unwrap_err().0;
        assert!(unknown.contains("no such model"), "{unknown}");
        assert_eq!(path_of("./relative/path"), Path::new("./relative/path"));
        std::fs::remove_dir_all(&cache).unwrap();
    }
}
