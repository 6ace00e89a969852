//! The requirements for every transport that serving relies on. Bytes land where they should and nowhere
//! else, in both directions; out-of-bounds or forbidden accesses are refused; after deregistration nothing
//! lands.

use super::pattern;
use crate::validate::case::{CaseResult, CaseStatus};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Endpoint, Piece, RemoteAccess, Transport};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Duration;

/// Allocates memory that the transports of this host can access.
pub type MakeMemory<'a> = dyn Fn(u64) -> Result<Arc<dyn SharedMemory>> + 'a;

/// Timeout for these small transfers; a host that needs longer is stuck.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Size of a region: several TCP frames and RDMA slices, and not a multiple of a page.
const BYTES: u64 = (3 << 20) + 123;

/// The two ends of a transport, which may be one value.
pub struct TransportEnds<'a> {
    /// The end that registers memory.
    pub owner: &'a dyn Transport,
    /// The end that connects.
    pub user: &'a dyn Transport,
    /// Allocates memory for both.
    pub make: &'a MakeMemory<'a>,
}

/// A requirement and its name in reports.
type TransportRequirement = (&'static str, fn(&TransportEnds<'_>) -> std::result::Result<(), String>);

const DEMANDS: [TransportRequirement; 5] = [
    ("scattered_writes", scattered_writes),
    ("reads", reads),
    ("bounds", bounds),
    ("access", access),
    ("fence", fence),
];

/// Returns the cases of a transport, such as `l4.tcp.reads`.
pub fn cases(group: &str) -> impl Iterator<Item = String> {
    DEMANDS.iter().map(move |(name, _)| format!("{group}.{name}"))
}

/// Runs the cases of `group` that `wanted` selects.
pub fn run(
    ends: &TransportEnds<'_>,
    group: &str,
    wanted: &dyn Fn(&str) -> bool,
    emit: &mut dyn FnMut(CaseResult),
) {
    for (id, (_, demand)) in cases(group).zip(DEMANDS).filter(|(id, _)| wanted(id)) {
        emit(match demand(ends) {
            Ok(()) => CaseResult::pass(id),
            Err(why) => CaseResult::new(id, CaseStatus::Fail, why),
        });
    }
}

/// A region of the owner and a connection to it.
struct ConnectedRegion {
    near: Arc<dyn SharedMemory>,
    far: Arc<dyn SharedMemory>,
    region: Descriptor,
    way: Box<dyn Endpoint>,
}

impl ConnectedRegion {
    fn new(ends: &TransportEnds<'_>, access: RemoteAccess) -> Result<Self> {
        let (near, far) = ((ends.make)(BYTES)?, (ends.make)(BYTES)?);
        near.store(0, &pattern(BYTES, 1))?;
        far.store(0, &pattern(BYTES, 2))?;
        let region = ends.owner.register(far.clone(), access)?;
        let way = ends.user.connect(near.clone(), &region)?;
        Ok(ConnectedRegion { near, far, region, way })
    }

    fn write(&mut self, pieces: &[Piece]) -> Result<()> {
        let transfer = self.way.write(pieces)?;
        self.way.wait(transfer, TIMEOUT)
    }

    fn read(&mut self, pieces: &[Piece]) -> Result<()> {
        let transfer = self.way.read(pieces)?;
        self.way.wait(transfer, TIMEOUT)
    }
}

fn text(error: Error) -> String {
    error.to_string()
}

/// Whether `memory` holds `expected`.
fn holds(memory: &dyn SharedMemory, expected: &[u8], what: &str) -> std::result::Result<(), String> {
    let mut wrong = None;
    let mut look = |bytes: &[u8]| wrong = (0..expected.len()).find(|&at| bytes[at] != expected[at]);
    memory.view(0, expected.len() as u64, &mut look).map_err(text)?;
    wrong.map_or(Ok(()), |at| Err(format!("{what}: byte {at} of {} is wrong", expected.len())))
}

/// Returns pieces of different sizes at odd offsets, with gaps in both memories.
fn pieces() -> Vec<Piece> {
    let lengths = [1, 4095, 4097, 65_536, 1_048_577, 7];
    let (mut local, mut remote, mut pieces) = (3, 5, Vec::new());
    for bytes in lengths {
        pieces.push(Piece { local, remote, bytes });
        (local, remote) = (local + bytes + 11, remote + bytes + 2);
    }
    pieces
}

/// Returns `target` after copying `pieces` of `source` to it.
fn expected(mut target: Vec<u8>, source: &[u8], copies: impl Iterator<Item = (u64, u64, u64)>) -> Vec<u8> {
    for (from, to, bytes) in copies {
        let (from, to, bytes) = (to_usize(from), to_usize(to), to_usize(bytes));
        target[to..to + bytes].copy_from_slice(&source[from..from + bytes]);
    }
    target
}

fn scattered_writes(ends: &TransportEnds<'_>) -> std::result::Result<(), String> {
    let mut joined = ConnectedRegion::new(ends, RemoteAccess::ReadWrite).map_err(text)?;
    joined.write(&pieces()).map_err(text)?;
    let copies = pieces().into_iter().map(|p| (p.local, p.remote, p.bytes));
    let want = expected(pattern(BYTES, 2), &pattern(BYTES, 1), copies);
    holds(&*joined.far, &want, "the owner's memory")?;
    holds(&*joined.near, &pattern(BYTES, 1), "the writer's memory")?;
    ends.owner.deregister(&joined.region).map_err(text)
}

fn reads(ends: &TransportEnds<'_>) -> std::result::Result<(), String> {
    let mut joined = ConnectedRegion::new(ends, RemoteAccess::ReadWrite).map_err(text)?;
    joined.read(&pieces()).map_err(text)?;
    let copies = pieces().into_iter().map(|p| (p.remote, p.local, p.bytes));
    let want = expected(pattern(BYTES, 1), &pattern(BYTES, 2), copies);
    holds(&*joined.near, &want, "the reader's memory")?;
    holds(&*joined.far, &pattern(BYTES, 2), "the owner's memory")?;
    ends.owner.deregister(&joined.region).map_err(text)
}

/// Checks that the call was refused with `kind`.
fn refused(result: Result<()>, kind: ErrorKind, what: &str) -> std::result::Result<(), String> {
    match result {
        Ok(()) => Err(format!("{what} went through")),
        Err(error) if error.kind == kind => Ok(()),
        Err(error) => Err(format!("{what}: {:?} instead of {kind:?}: {error}", error.kind)),
    }
}

fn bounds(ends: &TransportEnds<'_>) -> std::result::Result<(), String> {
    let mut joined = ConnectedRegion::new(ends, RemoteAccess::ReadWrite).map_err(text)?;
    let good = Piece { local: 0, remote: 0, bytes: 64 };
    for bad in [
        Piece { local: 0, remote: BYTES - 1, bytes: 2 },
        Piece { local: BYTES - 1, remote: 0, bytes: 2 },
        Piece { local: 0, remote: u64::MAX, bytes: 2 },
    ] {
        refused(joined.write(&[good, bad]), ErrorKind::Invalid, "a write out of bounds")?;
        refused(joined.read(&[good, bad]), ErrorKind::Invalid, "a read out of bounds")?;
    }
    holds(&*joined.far, &pattern(BYTES, 2), "the owner's memory after refusals")?;
    joined.write(&[good]).map_err(|error| format!("the connection after refusals: {error}"))?;
    ends.owner.deregister(&joined.region).map_err(text)
}

fn access(ends: &TransportEnds<'_>) -> std::result::Result<(), String> {
    let piece = [Piece { local: 0, remote: 0, bytes: 64 }];
    let mut written = ConnectedRegion::new(ends, RemoteAccess::Write).map_err(text)?;
    refused(written.read(&piece), ErrorKind::Invalid, "a read of a write-only region")?;
    ends.owner.deregister(&written.region).map_err(text)?;
    let mut read = ConnectedRegion::new(ends, RemoteAccess::Read).map_err(text)?;
    refused(read.write(&piece), ErrorKind::Invalid, "a write to a read-only region")?;
    holds(&*read.far, &pattern(BYTES, 2), "the owner's memory")?;
    ends.owner.deregister(&read.region).map_err(text)
}

fn fence(ends: &TransportEnds<'_>) -> std::result::Result<(), String> {
    let mut joined = ConnectedRegion::new(ends, RemoteAccess::ReadWrite).map_err(text)?;
    ends.owner.deregister(&joined.region).map_err(text)?;
    let late = joined.write(&[Piece { local: 0, remote: 0, bytes: BYTES }]);
    if late.is_ok() {
        return Err("a write after the region was deregistered was reported as done".into());
    }
    holds(&*joined.far, &pattern(BYTES, 2), "the owner's memory after a late write")?;
    let again = ends.user.connect(joined.near.clone(), &joined.region).map(drop);
    refused(again, ErrorKind::Closed, "a connection to a region that is not there")
}
