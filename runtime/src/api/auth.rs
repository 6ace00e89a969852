//! Authentication: API keys, and the tenants that own them.

use axum::http::{HeaderMap, header};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::errors::ApiError;
use super::usage::Account;
use crate::budget::Party;

/// Maximum number of tenants in one file.
const TENANTS_MAX: usize = 10_000;

/// Which requests a tenant may see under `/debug`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Debug {
    /// Nothing.
    None,
    /// Only its own requests.
    #[default]
    Own,
    /// All requests.
    All,
}

/// The owner of an API key.
#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    /// Empty if there is only one key, or none.
    pub(crate) name: String,
    /// Separates this tenant's blocks in the prefix cache; none if there is only one tenant.
    salt: Option<String>,
    requests_max: Option<usize>,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) debug: Debug,
    pub(crate) hide_cached_tokens: bool,
    pub(super) account: Arc<Account>,
    in_work: Arc<AtomicUsize>,
}

/// Counts a tenant's request in progress until it is dropped.
pub(crate) struct Seat(Arc<AtomicUsize>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Tenant {
    /// The tenant of all requests where there is no list of tenants.
    pub(crate) fn anyone(account: Arc<Account>) -> Self {
        Tenant {
            name: String::new(),
            salt: None,
            requests_max: None,
            max_tokens: None,
            debug: Debug::All,
            hide_cached_tokens: false,
            account,
            in_work: Arc::default(),
        }
    }

    /// The party that a request from `address` is accounted to. Without named tenants that is the address,
    /// since one key may serve everyone.
    pub(crate) fn party(&self, address: IpAddr) -> Party {
        match self.name.is_empty() {
            true => Party::Address(address),
            false => Party::Tenant(self.name.clone()),
        }
    }

    /// Counts a request, or refuses it.
    pub(crate) fn seat(&self) -> Result<Seat, ApiError> {
        let before = self.in_work.fetch_add(1, Ordering::AcqRel);
        let seat = Seat(self.in_work.clone());
        match self.requests_max {
            Some(max) if before >= max => {
                Err(ApiError::overloaded(format!("{max} requests of this key are being answered already"), 1))
            }
            _ => Ok(seat),
        }
    }

    /// The cache salt of a request: the tenant's salt, and within it the request's own.
    pub(crate) fn salted(&self, own: Option<&str>) -> Option<String> {
        match (&self.salt, own) {
            (None, own) => own.map(str::to_string),
            (Some(salt), own) => Some(format!("{}:{salt}:{}", salt.len(), own.unwrap_or_default())),
        }
    }

    /// Whether a request of `owner` is shown to this tenant under `/debug`.
    pub(crate) fn may_see(&self, owner: Option<&str>) -> bool {
        match self.debug {
            Debug::None => false,
            Debug::Own => owner == Some(&self.name),
            Debug::All => true,
        }
    }
}

/// The SHA-256 of a key: the key itself is not kept in memory, and every comparison takes the same time.
type Hash = [u8; 32];

/// A key's hash and its tenant.
type Known = (Hash, Arc<Tenant>);

fn hash(key: &[u8]) -> Hash {
    Sha256::digest(key).into()
}

/// The structure of a file of tenants.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    tenant: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    key: Option<String>,
    key_sha256: Option<String>,
    cache_salt: Option<String>,
    requests: Option<usize>,
    max_tokens: Option<u32>,
    #[serde(default)]
    debug: Debug,
    #[serde(default)]
    hide_cached_tokens: bool,
}

impl Entry {
    fn hash(&self) -> Result<Hash, String> {
        let name = &self.name;
        match (&self.key, &self.key_sha256) {
            (Some(key), None) if key.trim().is_empty() => Err(format!("tenant '{name}': 'key' is empty")),
            // Trimmed, since the key in a header is trimmed too.
            (Some(key), None) => Ok(hash(key.trim().as_bytes())),
            (None, Some(text)) => from_hexadecimal(text)
                .ok_or_else(|| format!("tenant '{name}': 'key_sha256' is not 64 hexadecimal digits")),
            _ => Err(format!("tenant '{name}': give either 'key' or 'key_sha256'")),
        }
    }
}

fn from_hexadecimal(text: &str) -> Option<Hash> {
    let mut bytes = [0; 32];
    if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(bytes)
}

/// The keys that are accepted.
#[derive(Default)]
pub struct Access {
    /// None if no key is required.
    keys: Option<RwLock<Vec<Known>>>,
    /// The tenant of all requests if no key is required.
    account: Arc<Account>,
    /// Whether cached tokens are hidden from all tenants.
    hide_cached_tokens: bool,
}

impl fmt::Debug for Access {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Access").field("keys", &self.keys.is_some()).finish_non_exhaustive()
    }
}

impl From<Option<String>> for Access {
    /// Accepts one key, or requires none.
    fn from(key: Option<String>) -> Self {
        let keys = key
            .map(|key| RwLock::new(vec![(hash(key.as_bytes()), Arc::new(Tenant::anyone(Arc::default())))]));
        Access { keys, ..Access::default() }
    }
}

impl Access {
    /// Reads tenants from the TOML text of a file.
    ///
    /// # Errors
    /// A description of the problem that contains no key.
    pub fn tenants(text: &str) -> Result<Self, String> {
        let access = Access { keys: Some(RwLock::default()), ..Access::default() };
        access.replace(text)?;
        Ok(access)
    }

    /// Sets whether cached tokens are hidden from all tenants.
    #[must_use]
    pub fn hiding_cached_tokens(self, hide: bool) -> Self {
        Access { hide_cached_tokens: hide, ..self }
    }

    /// Replaces the tenants by those of a changed file, keeping their accounts and counts of requests in
    /// progress. Returns the number of tenants.
    ///
    /// # Errors
    /// A description of the problem that contains no key; the old tenants stay in place.
    pub fn replace(&self, text: &str) -> Result<usize, String> {
        let Some(keys) = &self.keys else { return Err("no keys are required".into()) };
        let file: File = toml::from_str(text).map_err(|error| without_line(&error, text))?;
        let known: Vec<Arc<Tenant>> =
            keys.read().unwrap_or_else(PoisonError::into_inner).iter().map(|(_, t)| t.clone()).collect();
        let tenants = read(file, &known)?;
        let count = tenants.len();
        *keys.write().unwrap_or_else(PoisonError::into_inner) = tenants;
        Ok(count)
    }

    /// The tenant that sends a request, or `None` without a valid key.
    pub(crate) fn tenant(&self, headers: &HeaderMap) -> Option<Arc<Tenant>> {
        let tenant = match &self.keys {
            None => Arc::new(Tenant::anyone(self.account.clone())),
            Some(keys) => {
                let presented = hash(bearer(headers)?);
                let keys = keys.read().unwrap_or_else(PoisonError::into_inner);
                // Every key is compared, so that the time reveals nothing.
                let same = keys.iter().filter(|(hash, _)| same(hash, &presented));
                same.fold(None, |_, (_, tenant)| Some(tenant.clone()))?
            }
        };
        match self.hide_cached_tokens && !tenant.hide_cached_tokens {
            true => Some(Arc::new(Tenant { hide_cached_tokens: true, ..(*tenant).clone() })),
            false => Some(tenant),
        }
    }

    /// The tenants whose accounts are shown to `caller`: all, or itself alone.
    pub(crate) fn seen_by(&self, caller: &Arc<Tenant>) -> Vec<Arc<Tenant>> {
        match &self.keys {
            Some(keys) if caller.debug == Debug::All => {
                let keys = keys.read().unwrap_or_else(PoisonError::into_inner);
                keys.iter().map(|(_, tenant)| tenant.clone()).collect()
            }
            _ => vec![caller.clone()],
        }
    }
}

/// The key in the `Authorization` header.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let (scheme, key) = headers.get(header::AUTHORIZATION)?.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key.trim_ascii())
}

/// Checks the entries of a file. A tenant that existed before keeps its account and its count of requests in
/// progress.
fn read(file: File, known: &[Arc<Tenant>]) -> Result<Vec<Known>, String> {
    if file.tenant.is_empty() || file.tenant.len() > TENANTS_MAX {
        return Err(format!("it names {} tenants; expected 1 to {TENANTS_MAX}", file.tenant.len()));
    }
    let (mut names, mut hashes) = (HashSet::new(), HashSet::new());
    let mut tenants = Vec::new();
    for entry in file.tenant {
        let hash = entry.hash()?;
        let Entry { name, cache_salt, requests, max_tokens, debug, hide_cached_tokens, .. } = entry;
        if name.is_empty() || !names.insert(name.clone()) {
            return Err(format!("tenant '{name}': each needs a unique name"));
        }
        if !hashes.insert(hash) {
            return Err(format!("tenant '{name}': another tenant has the same key"));
        }
        if requests == Some(0) || max_tokens == Some(0) {
            return Err(format!("tenant '{name}': 'requests' and 'max_tokens' are at least 1"));
        }
        // Two tenants share a cache only if both name the same salt.
        let salt = Some(cache_salt.map_or_else(|| format!("tenant {name}"), |salt| format!("salt {salt}")));
        let before = known.iter().find(|tenant| tenant.name == name);
        let (account, in_work) =
            before.map_or_else(Default::default, |tenant| (tenant.account.clone(), tenant.in_work.clone()));
        let requests_max = requests;
        let tenant =
            Tenant { name, salt, requests_max, max_tokens, debug, hide_cached_tokens, account, in_work };
        tenants.push((hash, Arc::new(tenant)));
    }
    Ok(tenants)
}

/// The error without the line it refers to, which may hold a key.
fn without_line(error: &toml::de::Error, text: &str) -> String {
    let line = error.span().map(|span| text.get(..span.start).unwrap_or_default().matches('\n').count() + 1);
    let kind = match error.message() {
        message if message.contains("unknown field") || message.contains("missing field") => message,
        message if message.contains("duplicate key") => "a key is given twice",
        _ => "not as expected",
    };
    line.map_or_else(|| kind.to_string(), |line| format!("line {line}: {kind}"))
}

/// Compares two hashes in constant time.
fn same(left: &Hash, right: &Hash) -> bool {
    left.iter().zip(right).fold(0, |sum, (a, b)| std::hint::black_box(sum | (a ^ b))) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn only_the_whole_key_is_admitted() {
        let access = Access::from(Some("secret".to_string()));
        let admits = |value: &str| access.tenant(&with(value)).is_some();
        assert!(admits("Bearer secret") && admits("bearer secret"));
        for wrong in ["secret", "Bearer", "Bearer ", "Bearer secre", "Bearer secrets", "Basic secret", ""] {
            assert!(!admits(wrong), "{wrong}");
        }
        assert!(access.tenant(&HeaderMap::new()).is_none());
        assert!(Access::from(None).tenant(&HeaderMap::new()).is_some());
    }

    const TWO: &str = "
        [[tenant]]
        name = 'a'
        key = 'alpha'
        requests = 1
        [[tenant]]
        name = 'b'
        # of 'beta'
        key_sha256 = 'F44E64E75F3948E9F73F8DFA94721C4CE8CBB4F265C4790C702B2D41CFBF2753'
    ";

    #[test]
    fn a_key_is_known_by_itself_or_by_its_hash() {
        let access = Access::tenants(TWO).unwrap();
        let name = |key: &str| access.tenant(&with(&format!("Bearer {key}"))).map(|t| t.name.clone());
        assert_eq!((name("alpha").as_deref(), name("beta").as_deref()), (Some("a"), Some("b")));
        assert_eq!(name("gamma"), None);
        let held = format!("{:?}", access.keys);
        assert!(!held.contains("alpha"), "the key itself is not kept: {held}");
    }

    #[test]
    fn no_two_tenants_share_a_cache_unless_both_name_its_salt() {
        let access = Access::tenants(TWO).unwrap();
        let tenant = |key: &str| access.tenant(&with(&format!("Bearer {key}"))).unwrap();
        let (a, b) = (tenant("alpha"), tenant("beta"));
        let salts = [a.salted(None), b.salted(None), a.salted(Some("x")), b.salted(Some("x")), None];
        assert_eq!(salts.iter().collect::<HashSet<_>>().len(), salts.len(), "{salts:?}");
        let derived = "[[tenant]]\nname='c'\nkey='c'\ncache_salt='tenant a'".to_string();
        let explicit = Access::tenants(&derived).unwrap().tenant(&with("Bearer c")).unwrap();
        assert_ne!(explicit.salted(None), a.salted(None), "no salt imitates a name");
        let shared = |name| format!("[[tenant]]\nname='{name}'\nkey='{name}'\ncache_salt='s'\n");
        let shared = Access::tenants(&(shared("d") + &shared("e"))).unwrap();
        let salt = |key: &str| shared.tenant(&with(&format!("Bearer {key}"))).unwrap().salted(None);
        assert_eq!(salt("d"), salt("e"));
    }

    #[test]
    fn a_changed_file_counts_on_and_a_broken_one_changes_nothing() {
        let access = Access::tenants(TWO).unwrap();
        let seat = access.tenant(&with("Bearer alpha")).unwrap().seat().ok().unwrap();
        assert_eq!(access.replace("[[tenant]]\nname='a'\nkey='new'\nrequests=1"), Ok(1));
        assert!(
            access.tenant(&with("Bearer alpha")).is_none() && access.tenant(&with("Bearer beta")).is_none()
        );
        let a = access.tenant(&with("Bearer new")).unwrap();
        assert!(a.seat().is_err());
        drop(seat);
        assert!(a.seat().is_ok());
        access.replace("[[tenant]").unwrap_err();
        assert!(access.tenant(&with("Bearer new")).is_some());
    }

    #[test]
    fn what_is_wrong_with_a_file_is_told_without_its_keys() {
        let entry = |rest: &str| format!("[[tenant]]\nname = 'a'\n{rest}");
        for (text, why) in [
            (String::new(), "names 0 tenants"),
            (entry(""), "either 'key' or 'key_sha256'"),
            (entry("key = 's3cret'\nkey_sha256 = 's3cret'"), "either 'key' or 'key_sha256'"),
            (entry("key = ' '"), "'key' is empty"),
            (entry("key_sha256 = 's3cret'"), "64 hexadecimal digits"),
            (entry("key = 's3cret'\nrequests = 0"), "at least 1"),
            (entry("key = 's3cret'\nlimit = 0"), "unknown field `limit`"),
            (entry("key = 's3cret'\ndebug = 's3cret'"), "line 4"),
            (entry("key = 's3cret"), "line 3"),
            (entry("key = 's3cret'\n") + &entry("key = 'other'"), "a unique name"),
            (entry("key = 's3cret'\n[[tenant]]\nname='b'\nkey='s3cret'"), "the same key"),
        ] {
            let error = Access::tenants(&text).unwrap_err();
            assert!(error.contains(why) && !error.contains("s3cret"), "{error}");
        }
    }
}
