//! Signed reports, in the format of minisign: the checksums are signed, and they cover every file.

use crate::failure::{Failed, UsageError};
use crate::screen;
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use minisign::{PublicKey, PublicKeyBox, SecretKey, SecretKeyBox, SignatureBox};
use mixfleet_hwtests::validate::{Validation, sha256};
use mixfleet_report::files::write_whole;
use serde_json::json;
use std::io::{Cursor, IsTerminal, Write};
use std::path::{Path, PathBuf};

const SUMS: &str = "SHA256SUMS";
const SIGNATURE: &str = "SHA256SUMS.minisig";
/// Maximum size of a file of a report: a log of a long run has some tens of megabytes.
const FILE_BYTES_MAX: u64 = 4 << 30;
/// Source of a key's password without a terminal.
const PASSWORD: &str = "MIXFLEET_SIGN_PASSWORD";
/// Characters of the last line of a signature: 64 bytes in base64.
const LAST_LINE: usize = 88;

#[derive(Debug, Args)]
pub(super) struct VerifyArgs {
    /// The report's folder
    folder: PathBuf,
    /// The signer's public key: a minisign file, or the key itself (RW...)
    #[arg(long, value_name = "PUBLIC")]
    key: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A key that signs.
pub(super) struct Signer(SecretKey);

impl Signer {
    /// Reads a secret key of minisign, and prompts for its password if it has one.
    pub(super) fn open(file: &Path) -> Result<Signer> {
        let text = mixfleet_hal::files::read_text(file);
        let text =
            text.map_err(|error| UsageError(format!("cannot read the key {}: {error}", file.display())))?;
        let key = || SecretKeyBox::from_string(&text);
        let wrong = |error: minisign::PError| UsageError(format!("{}: {error}", file.display()));
        if let Ok(key) = key().and_then(SecretKeyBox::into_unencrypted_secret_key) {
            return Ok(Signer(key));
        }
        let password = std::env::var(PASSWORD).ok();
        if password.is_none() && !std::io::stdin().is_terminal() {
            let what = "is no key without a password; to give one without a terminal, set";
            bail!(UsageError(format!("{} {what} {PASSWORD}", file.display())));
        }
        Ok(Signer(key().and_then(|key| key.into_secret_key(password)).map_err(wrong)?))
    }

    /// Signs the checksums of a report's folder; returns the file of the signature.
    pub(super) fn sign(&self, folder: &Path, report: &Validation) -> Result<PathBuf> {
        let sums = read(&folder.join(SUMS))?;
        let name = report.device.as_ref().map_or("a device that did not open", |device| &device.name);
        // names come from drivers, and a comment is one line
        let name: String = name.chars().filter(|c| !c.is_control()).collect();
        let (verdict, date) = (report.verdict.word(), &report.date);
        let comment = format!("mixfleet validation of {name} on {date}: {verdict}");
        let signed =
            minisign::sign(None, &self.0, Cursor::new(&sums), Some(&comment), Some("signature of mixfleet"));
        let signature = signed.map_err(|error| anyhow!("cannot sign the report: {error}"))?;
        let file = folder.join(SIGNATURE);
        write_whole(&file, &signature.to_bytes())
            .with_context(|| format!("cannot write {}", file.display()))?;
        Ok(file)
    }
}

fn read(file: &Path) -> Result<Vec<u8>> {
    mixfleet_hal::files::read(file, FILE_BYTES_MAX).with_context(|| format!("cannot read {}", file.display()))
}

fn public(key: &str) -> Result<PublicKey> {
    let of_file = |text: String| PublicKeyBox::from_string(&text).and_then(PublicKeyBox::into_public_key);
    let wrong = |error: minisign::PError| UsageError(format!("--key {key}: {error}"));
    match mixfleet_hal::files::read_text(Path::new(key)) {
        Ok(text) => Ok(of_file(text).map_err(wrong)?),
        Err(_) if key.starts_with("RW") => Ok(PublicKey::from_base64(key).map_err(wrong)?),
        Err(error) => bail!(UsageError(format!("--key {key} is not a file ({error}) and not a public key"))),
    }
}

/// Checks the signature of a folder's checksums, and the folder by them.
pub(super) fn verify(args: &VerifyArgs) -> Result<()> {
    let key = public(&args.key)?;
    let folder = &args.folder;
    let sums = read(&folder.join(SUMS))?;
    let text = String::from_utf8(read(&folder.join(SIGNATURE))?);
    let text = text.map_err(|_| Failed(format!("{SIGNATURE} is no text, so no signature")))?;
    let comment = signed_with(&key, &sums, &text).map_err(|why| Failed(format!("{SIGNATURE}: {why}")))?;
    let files = listed(&sums).map_err(Failed)?;
    for (sum, name) in &files {
        let file = folder.join(name);
        let bytes = mixfleet_hal::files::read(&file, FILE_BYTES_MAX)
            .map_err(|error| Failed(format!("{}: {error}", file.display())))?;
        if sha256(&bytes) != *sum {
            bail!(Failed(format!("{} is not as it was signed", file.display())));
        }
    }
    let names: Vec<&str> = files.iter().map(|(_, name)| name.as_str()).collect();
    check_unlisted(folder, &names)?;
    let mut out = screen::output(args.json);
    if args.json {
        let document =
            json!({"schema": "mixfleet.validation-signature/1", "trusted_comment": comment, "files": names});
        writeln!(out, "{document:#}")?;
    } else {
        writeln!(out, "signed: {comment}\nas they were signed: {}", names.join(", "))?;
    }
    Ok(())
}

/// Refuses a folder with unsigned files: a reader would take them for signed.
fn check_unlisted(folder: &Path, listed: &[&str]) -> Result<()> {
    let failed = || format!("cannot read {}", folder.display());
    for entry in std::fs::read_dir(folder).with_context(failed)? {
        let name = entry.with_context(failed)?.file_name();
        let is_listed =
            name.to_str().is_some_and(|name| listed.contains(&name) || [SUMS, SIGNATURE].contains(&name));
        if !is_listed {
            let file = folder.join(&name);
            let what = "is in the folder of a signed report and was not signed with it; remove it";
            bail!(Failed(format!("{} {what}", file.display())));
        }
    }
    Ok(())
}

/// Returns the comment that was signed with the bytes.
fn signed_with(key: &PublicKey, bytes: &[u8], signature: &str) -> Result<String, String> {
    // the library accepts the last line at any length
    if signature.lines().nth(3).is_none_or(|line| line.trim().len() != LAST_LINE) {
        return Err("is no signature of minisign: its fourth line is not one of 64 bytes".to_owned());
    }
    let signature = SignatureBox::from_string(signature).map_err(|error| error.to_string())?;
    minisign::verify(key, &signature, Cursor::new(bytes), true, false, false)
        .map_err(|error| error.to_string())?;
    signature.trusted_comment().map_err(|error| error.to_string())
}

/// The checksums and names of a report's files, none of which is outside of its folder.
fn listed(sums: &[u8]) -> Result<Vec<(String, String)>, String> {
    let text = std::str::from_utf8(sums).map_err(|error| format!("{SUMS}: {error}"))?;
    let one = |line: &str| {
        let (sum, name) = line.split_once("  ").ok_or_else(|| format!("{SUMS}: no checksum in '{line}'"))?;
        match name.is_empty() || name.contains(['/', '\\']) || name == ".." {
            true => Err(format!("{SUMS}: '{name}' is no file of a report")),
            false => Ok((sum.to_owned(), name.to_owned())),
        }
    };
    let files = text.lines().map(one).collect::<Result<Vec<_>, _>>()?;
    match files.iter().any(|(_, name)| name == "results.json") {
        true => Ok(files),
        false => Err(format!("{SUMS}: results.json is not among its files")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minisign::KeyPair;

    #[test]
    fn what_is_no_signature_is_told_and_nothing_panics() {
        let KeyPair { pk, sk } = KeyPair::generate_unencrypted_keypair().unwrap();
        let sums = b"00  results.json\n";
        let signed =
            minisign::sign(None, &sk, Cursor::new(sums), Some("a comment"), None).unwrap().into_string();
        assert_eq!(signed_with(&pk, sums, &signed), Ok("a comment".to_owned()));
        let other = KeyPair::generate_unencrypted_keypair().unwrap().pk;
        assert!(signed_with(&other, sums, &signed).unwrap_err().contains("key"));
        assert!(signed_with(&pk, b"00  results.jsom\n", &signed).is_err());
        assert!(signed_with(&pk, sums, &signed.replace("a comment", "another")).is_err());
        for (at, _) in signed.char_indices() {
            let changed = [&signed[..at], "A", &signed[at + 1..]].concat();
            if changed != signed && at > "untrusted comment: signature from mini".len() + 30 {
                // some characters are of the untrusted comment, or only pad
                let _ = signed_with(&pk, sums, &changed);
            }
            assert!(signed_with(&pk, sums, &signed[..at]).is_err() || at + 1 == signed.len(), "{at}");
        }
        for key in ["RW", "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO", "no such file"] {
            assert!(public(key).is_err(), "{key}");
        }
    }

    #[test]
    fn only_files_of_the_report_are_listed() {
        assert_eq!(listed(b"00  results.json\n11  log.jsonl\n").unwrap().len(), 2);
        for (sums, told) in [
            ("00  ../results.json\n", "no file of a report"),
            ("00 results.json\n", "no checksum"),
            ("00  report.html\n", "results.json is not among"),
            ("", "results.json is not among"),
        ] {
            let error = listed(sums.as_bytes()).unwrap_err();
            assert!(error.contains(told), "{sums}: {error}");
        }
    }
}
