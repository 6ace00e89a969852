//! Authentication between processes of one host without certificates.
//!
//! All processes share a token, which is never sent: a caller presents a keyed hash of its greeting and of
//! the address it called, and the process answers with another. Reading etcd, or listening at the address of
//! a process that ended, reveals nothing that is useful elsewhere.

use ring::hmac::{HMAC_SHA256, Key, sign, verify};
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt::Display;

const NONCE_BYTES: usize = 16;
const TOKEN_BYTES: usize = 32;

/// The secret shared by the processes that one user runs on one host.
#[derive(Clone)]
pub struct Token(Key);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

/// The proof that a caller presents, and the answer that it expects.
pub struct Proof {
    /// What it presents.
    pub shown: Vec<u8>,
    answer: Vec<u8>,
}

impl Token {
    /// Parses 64 hexadecimal digits, with white space around them.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        if text.len() != 2 * TOKEN_BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).ok();
        let bytes: Vec<u8> = (0..text.len()).step_by(2).map(byte).collect::<Option<_>>()?;
        Some(Token(Key::new(HMAC_SHA256, &bytes)))
    }

    /// The text of a random token; none if the operating system has no randomness.
    pub fn random_text() -> Option<String> {
        let mut bytes = [0; TOKEN_BYTES];
        SystemRandom::new().fill(&mut bytes).ok()?;
        Some(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// The proof for a call of `path` at `address` with `greeting`.
    pub fn prove(&self, path: &str, address: &impl Display, greeting: &[u8]) -> Option<Proof> {
        let mut nonce = [0; NONCE_BYTES];
        SystemRandom::new().fill(&mut nonce).ok()?;
        let said = words(b"call", path, address, greeting, &nonce);
        let shown = [&nonce, sign(&self.0, &said).as_ref()].concat();
        Some(Proof { shown, answer: words(b"answer", path, address, greeting, &nonce) })
    }

    /// The answer of the process at `address` to a caller that knows the token; none for others.
    pub fn admit(
        &self,
        shown: &[u8],
        path: &str,
        address: &impl Display,
        greeting: &[u8],
    ) -> Option<Vec<u8>> {
        let (nonce, tag) = shown.split_at_checked(NONCE_BYTES)?;
        verify(&self.0, &words(b"call", path, address, greeting, nonce), tag).ok()?;
        Some(sign(&self.0, &words(b"answer", path, address, greeting, nonce)).as_ref().to_vec())
    }

    /// Whether the called process knows the token too.
    pub fn is_answered(&self, proof: &Proof, answer: &[u8]) -> bool {
        verify(&self.0, &proof.answer, answer).is_ok()
    }
}

/// Concatenates the parts, each after its length, so that they are unambiguous.
fn words(what: &[u8], path: &str, address: &impl Display, greeting: &[u8], nonce: &[u8]) -> Vec<u8> {
    let address = address.to_string();
    let parts = [b"mixfleet", what, path.as_bytes(), address.as_bytes(), greeting, nonce];
    parts.iter().flat_map(|part| [&(part.len() as u64).to_le_bytes(), *part].concat()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    #[test]
    fn a_proof_is_for_one_call_to_one_address_by_who_knows_the_token() {
        let token = || Token::parse(&"5a".repeat(TOKEN_BYTES)).unwrap();
        let other = Token::parse(&Token::random_text().unwrap()).unwrap();
        let (here, there) = (SocketAddr::from(([127, 0, 0, 1], 1)), SocketAddr::from(([127, 0, 0, 1], 2)));
        let proof = token().prove("/a", &here, b"hello").unwrap();
        let answer = token().admit(&proof.shown, "/a", &here, b"hello").unwrap();
        assert!(token().is_answered(&proof, &answer) && !other.is_answered(&proof, &answer));
        assert!(!token().is_answered(&proof, &proof.shown[NONCE_BYTES..]));
        assert!(token().admit(&proof.shown, "/b", &here, b"hello").is_none());
        assert!(token().admit(&proof.shown, "/a", &there, b"hello").is_none());
        assert!(token().admit(&proof.shown, "/a", &here, b"hellO").is_none());
        assert!(other.admit(&proof.shown, "/a", &here, b"hello").is_none());
        assert!(token().admit(&[], "/a", &here, b"hello").is_none());
    }

    #[test]
    fn other_text_is_no_token() {
        for text in ["", "5a", &"5g".repeat(TOKEN_BYTES), &"é".repeat(TOKEN_BYTES)] {
            assert!(Token::parse(text).is_none(), "{text}");
        }
    }
}
