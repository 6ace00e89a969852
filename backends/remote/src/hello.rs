//! The first messages: both ends show that they are of one fleet, and that they speak one version.

use crate::code::{Taker, put_bytes, put_error};
use crate::frame::{FrameReader, put_frame};
use crate::protocol::{CALL_TIMEOUT, HELLO_BYTES_MAX, MAGIC, VERSION, tell};
use mixfleet_hal::{DeviceInfo, DeviceLimits, Error, ErrorKind, Result};
use mixfleet_wire::{Duplex, LinkAddress, Security};
use std::sync::Arc;
use std::time::Instant;

const NONCE_BYTES: usize = 16;

/// The end of an error about missing protection.
const NEEDS_SECRET: &str =
    "devices are lent between processes with certificates, or with the token of one host";

/// Whether an answer comes from a process with the same secret.
pub type AnswerCheck = Box<dyn Fn(&[u8]) -> bool>;

/// What a caller shows, and the check of what it is answered.
pub struct Shown {
    /// The proof.
    pub proof: Vec<u8>,
    /// The check.
    pub is_answered: AnswerCheck,
}

/// A secret of all processes of one host, which is never sent.
pub trait SharedSecret: Send + Sync {
    /// What a caller of `address` shows after `greeting`; `None` if the system has no randomness.
    fn prove(&self, address: &LinkAddress, greeting: &[u8]) -> Option<Shown>;

    /// What the process at `address` answers to a caller that has the secret; `None` for others.
    fn admit(&self, proof: &[u8], address: &LinkAddress, greeting: &[u8]) -> Option<Vec<u8>>;
}

/// Protection between processes that lend each other devices.
#[derive(Clone)]
pub struct DeviceAccess {
    /// Encryption, and certificates.
    pub security: Security,
    /// The secret of this host's processes, where there are no certificates.
    pub secret: Option<Arc<dyn SharedSecret>>,
}

impl DeviceAccess {
    /// Checks that the ends can authenticate each other.
    pub(crate) fn check(&self) -> Result<()> {
        self.secret().map(drop)
    }

    /// The secret, where no certificates do its work.
    ///
    /// # Errors
    /// `Unsupported` when neither is there.
    fn secret(&self) -> Result<Option<&dyn SharedSecret>> {
        match (&self.security, &self.secret) {
            #[allow(unreachable_patterns, reason = "only some builds have TLS")]
            (Security::LoopbackOnly | Security::Insecure, Some(secret)) => Ok(Some(&**secret)),
            (Security::LoopbackOnly | Security::Insecure, None) => Err(Error::unsupported(NEEDS_SECRET)),
            #[allow(unreachable_patterns, reason = "only some builds have TLS")]
            _ => Ok(None),
        }
    }
}

fn refused(detail: impl Into<String>) -> Error {
    Error::new(ErrorKind::Closed, detail)
}

fn send(link: &Duplex, fill: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
    let mut out = Vec::new();
    put_frame(&mut out, tell::REPLY, 0, |out| {
        fill(out);
        Ok::<(), Error>(())
    })?;
    link.send(&[&out], CALL_TIMEOUT, &mut || Ok(false)).map_err(|error| refused(error.to_string()))
}

fn receive(link: &Duplex, reader: &mut FrameReader, deadline: Instant) -> Result<crate::frame::MessageBody> {
    let came = reader.next(link, Some(deadline)).map_err(|error| refused(error.to_string()))?;
    let came = came.ok_or_else(|| Error::new(ErrorKind::Timeout, "the other process does not answer"))?;
    Ok(reader.kept(came))
}

/// Checks the beginning of the other end's first message.
fn check_version(taker: &mut Taker<'_>) -> Result<()> {
    if taker.byte()? != tell::REPLY || taker.array()? != MAGIC {
        return Err(refused("the process that answered lends no device"));
    }
    let version = u32::from_le_bytes(taker.array()?);
    if version != VERSION {
        let message =
            format!("it speaks version {version} of the protocol, and this process version {VERSION}");
        return Err(Error::unsupported(message));
    }
    Ok(())
}

/// The calling end; what the called end's device is.
///
/// # Errors
/// If the other end lends no device, speaks another version, or is not of this fleet.
pub(crate) fn call(
    link: &Duplex,
    reader: &mut FrameReader,
    access: &DeviceAccess,
    deadline: Instant,
) -> Result<(DeviceInfo, DeviceLimits)> {
    let secret = access.secret()?;
    let challenge = receive(link, reader, deadline)?;
    check_version(&mut Taker(&challenge))?;
    let shown = secret.map(|secret| {
        secret
            .prove(link.address(), &challenge)
            .ok_or_else(|| Error::new(ErrorKind::Other, "no random bytes"))
    });
    let shown = shown.transpose()?;
    send(link, |out| {
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        put_bytes(out, shown.as_ref().map_or(&[], |shown| &shown.proof));
    })?;
    let welcome = receive(link, reader, deadline)?;
    let mut taker = Taker(&welcome);
    if taker.byte()? != tell::REPLY {
        return Err(refused("the process that answered lends no device"));
    }
    if taker.byte()? != 0 {
        return Err(taker.error()?);
    }
    let answer = taker.bytes()?;
    if shown.is_some_and(|shown| !(shown.is_answered)(answer)) {
        return Err(refused("the process that answered has another token"));
    }
    let text = taker.bytes()?;
    let info = serde_json::from_slice(text).map_err(|error| refused(format!("its device: {error}")))?;
    let limits = take_limits(&mut taker)?;
    taker.end()?;
    Ok((info, limits))
}

/// The called end, which lends a device.
///
/// # Errors
/// If the caller speaks another version, or is not of this fleet; the caller gets the reason.
pub(crate) fn welcome(
    link: &Duplex,
    reader: &mut FrameReader,
    access: &DeviceAccess,
    info: &DeviceInfo,
    limits: &DeviceLimits,
    deadline: Instant,
) -> Result<()> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|error| Error::new(ErrorKind::Other, error.to_string()))?;
    let mut challenge = vec![tell::REPLY];
    challenge.extend(MAGIC);
    challenge.extend(VERSION.to_le_bytes());
    challenge.extend(nonce);
    send(link, |out| out.extend(&challenge[1..]))?;
    let hello = receive(link, reader, deadline)?;
    let admitted = admit(link, &hello, &challenge, access);
    let answer = match admitted {
        Ok(answer) => answer,
        Err(error) => {
            send(link, |out| {
                out.push(1);
                put_error(out, &error);
            })?;
            return Err(error);
        }
    };
    let text = serde_json::to_vec(info).map_err(|error| Error::invalid(error.to_string()))?;
    if text.len() + answer.len() > HELLO_BYTES_MAX / 2 {
        return Err(Error::invalid("the device's description is too long"));
    }
    send(link, |out| {
        out.push(0);
        put_bytes(out, &answer);
        put_bytes(out, &text);
        put_limits(out, limits);
    })
}

fn admit(link: &Duplex, hello: &[u8], challenge: &[u8], access: &DeviceAccess) -> Result<Vec<u8>> {
    let mut taker = Taker(hello);
    check_version(&mut taker)?;
    let proof = taker.bytes()?;
    taker.end()?;
    let Some(secret) = access.secret()? else { return Ok(Vec::new()) };
    secret.admit(proof, link.address(), challenge).ok_or_else(|| {
        refused(
            "the caller does not have this process's token: processes of several users need one --token-file",
        )
    })
}

fn put_limits(out: &mut Vec<u8>, limits: &DeviceLimits) {
    let DeviceLimits { allocation_bytes_max, alignment_bytes, kv_page_tokens, replay_pays, .. } = limits;
    out.extend(allocation_bytes_max.to_le_bytes());
    out.extend(alignment_bytes.to_le_bytes());
    out.extend(kv_page_tokens.to_le_bytes());
    out.push(u8::from(*replay_pays));
}

fn take_limits(taker: &mut Taker<'_>) -> Result<DeviceLimits> {
    let limits = DeviceLimits {
        allocation_bytes_max: u64::from_le_bytes(taker.array()?),
        alignment_bytes: u64::from_le_bytes(taker.array()?),
        kv_page_tokens: u32::from_le_bytes(taker.array()?),
        replay_pays: taker.byte()? != 0,
        // the other process has no access to this process's memory
        imports_host_memory: false,
        // one connection has one order
        copies_beside: false,
    };
    if limits.alignment_bytes == 0 || limits.kv_page_tokens == 0 {
        return Err(refused("its device has no alignment, or pages without tokens"));
    }
    Ok(limits)
}
