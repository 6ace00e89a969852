//! A disk in memory that follows a fault plan, loses power, and crashes in the middle of a write.

use super::Disk;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hal::random;
use std::collections::{BTreeMap, HashMap};
use std::io::{Error, ErrorKind, Result};
use std::mem::{Discriminant, discriminant};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The point at which the process that uses the disk dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crash {
    /// The change (a write, a truncation, a rename or a removal) in which it dies, counted from 0.
    pub change: u64,
    /// Leading bytes of a write that still arrive; any other change is carried out if this is not 0.
    pub bytes: u64,
}

struct Write {
    offset: usize,
    data: Vec<u8>,
}

#[derive(Clone, Default)]
struct File {
    now: Vec<u8>,
    /// Content that certainly survives a loss of power, followed by the writes since, in order.
    safe: Vec<u8>,
    unsafe_since: Vec<Arc<Write>>,
}

/// Files by name.
type Names = BTreeMap<String, u64>;

/// How long operations take, in an environment that has time.
#[derive(Clone)]
struct Time {
    read: Duration,
    write: Duration,
    hang: Duration,
    wait: Arc<dyn Fn(Duration) + Send + Sync>,
}

#[derive(Default)]
struct State {
    files: BTreeMap<u64, File>,
    files_made: u64,
    names: Names,
    /// Names that certainly survive a loss of power, followed by the names after each change since, in order.
    safe_names: Names,
    names_since: Vec<Names>,
    time: Option<Time>,
    struck: HashMap<Discriminant<Fault>, u64>,
    plan: FaultPlan,
    operations: u64,
    changes: u64,
    crash: Option<Crash>,
    dead: bool,
    room_bytes: Option<u64>,
    remembers: bool,
}

/// Files in memory, shared by clones. Reads and writes are numbered as they come, for the [`FaultPlan`].
///
/// `BitFlip` corrupts a bit permanently (before a read, after a write). `Drop` and `Stale` lose a write and
/// do not affect a read. `Fail` is an error. Where the disk [has time](Self::takes), `Slow` and `Hang` are
/// late; otherwise `Slow` does nothing, and `Hang` is an error.
#[derive(Clone, Default)]
pub struct SimDisk(Arc<Mutex<State>>);

impl std::fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state();
        write!(f, "SimDisk({} files, {} changes)", state.files.len(), state.changes)
    }
}

impl SimDisk {
    /// An empty disk whose operations are subject to `plan`.
    pub fn new(plan: FaultPlan) -> Self {
        let disk = SimDisk::default();
        disk.set_plan(plan);
        disk
    }

    /// An empty disk that can [lose power](Self::lose_power): it records every write since a file's last
    /// sync.
    pub fn with_power_losses() -> Self {
        let disk = SimDisk::default();
        disk.state().remembers = true;
        disk
    }

    /// Applies `plan` to operations from now on, without resetting their numbers.
    pub fn set_plan(&self, plan: FaultPlan) {
        self.state().plan = plan;
    }

    /// Limits the bytes of all files together from now on; none removes the limit.
    pub fn set_room(&self, bytes: Option<u64>) {
        self.state().room_bytes = bytes;
    }

    /// Makes the process die at `crash`: every operation after it fails, until [`restart`](Self::restart).
    pub fn crash_at(&self, crash: Crash) {
        self.state().crash = Some(crash);
    }

    /// Number of changes so far, which a [`Crash`] counts.
    pub fn changes(&self) -> u64 {
        self.state().changes
    }

    /// Number of operations so far, which a fault plan counts.
    pub fn operations(&self) -> u64 {
        self.state().operations
    }

    /// Whether the process died.
    pub fn is_dead(&self) -> bool {
        self.state().dead
    }

    /// Bytes of all files.
    pub fn used_bytes(&self) -> u64 {
        used(&self.state())
    }

    /// The disk as a process finds it that starts after the crash: all writes are there, since the system
    /// survived.
    pub fn restart(&self) -> SimDisk {
        let state = self.state();
        let after = State {
            files: state.files.clone(),
            files_made: state.files_made,
            names: state.names.clone(),
            safe_names: state.safe_names.clone(),
            names_since: state.names_since.clone(),
            room_bytes: state.room_bytes,
            remembers: state.remembers,
            ..State::default()
        };
        SimDisk(Arc::new(Mutex::new(after)))
    }

    /// The disk after a power failure. By `seed`, each write after a file's last sync arrived whole, in part
    /// or not at all, and so did a leading part of the renames after their last sync. A disk that does not
    /// record writes loses all of them.
    pub fn lose_power(&self, seed: u64) -> SimDisk {
        let after = self.restart();
        let mut index = 0;
        let mut state = after.state();
        let since = std::mem::take(&mut state.names_since);
        let kept = to_usize(random::bits(seed ^ 0xD1, 0) % (since.len() as u64 + 1));
        if let Some(names) = kept.checked_sub(1).and_then(|last| since.into_iter().nth(last)) {
            state.safe_names = names;
        }
        state.names = state.safe_names.clone();
        state.forget_nameless();
        for file in state.files.values_mut() {
            file.now = std::mem::take(&mut file.safe);
            for written in std::mem::take(&mut file.unsafe_since) {
                let length = written.data.len() as u64;
                let arrived = match random::bits(seed, index) % 4 {
                    0 => 0,
                    1 => random::bits(!seed, index) % (length + 1),
                    _ => length,
                };
                index += 1;
                put(&mut file.now, written.offset, &written.data[..to_usize(arrived)]);
            }
            file.safe = file.now.clone();
        }
        drop(state);
        after
    }

    /// Flips one bit of a file, if the file is that long.
    pub fn rot(&self, file: &str, bit: u64) {
        if let Some(byte) = self.state().file(file).and_then(|file| file.now.get_mut((bit / 8) as usize)) {
            *byte ^= 1 << (bit % 8);
        }
    }

    /// Makes each read or write take `operation`, or `hang` where it hangs, in the caller's `wait`; the
    /// operation is carried out afterwards.
    pub fn takes(
        &self,
        operation: Duration,
        hang: Duration,
        wait: impl Fn(Duration) + Send + Sync + 'static,
    ) {
        self.state().time = Some(Time { read: operation, write: operation, hang, wait: Arc::new(wait) });
    }

    /// Makes each read take so long in the caller's `wait`; writes take no time.
    pub fn reads_take(&self, read: Duration, wait: impl Fn(Duration) + Send + Sync + 'static) {
        self.state().time = Some(Time { read, write: Duration::ZERO, hang: read, wait: Arc::new(wait) });
    }

    /// Number of operations that suffered a fault of this kind.
    pub fn struck(&self, fault: Fault) -> u64 {
        self.state().struck.get(&discriminant(&fault)).copied().unwrap_or(0)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out a change that is not a write, unless the process dies of it.
    fn change(&self, change: impl FnOnce(&mut State) -> Result<()>) -> Result<()> {
        let mut state = self.state();
        match state.start_change()? {
            Some(0) => Err(died()),
            Some(_) => change(&mut state).and_then(|()| Err(died())),
            None => change(&mut state),
        }
    }
}

impl State {
    fn file(&mut self, name: &str) -> Option<&mut File> {
        self.files.get_mut(self.names.get(name)?)
    }

    fn length(&self, name: &str) -> Option<u64> {
        let file = self.files.get(self.names.get(name)?)?;
        Some(file.now.len() as u64)
    }

    fn names_changed(&mut self) {
        if self.remembers {
            self.names_since.push(self.names.clone());
        }
        self.forget_nameless();
    }

    /// Deletes content that no name refers to, nor could after a power failure.
    fn forget_nameless(&mut self) {
        let State { files, names, safe_names, names_since, .. } = self;
        let possible = || names_since.iter().chain([&*names, &*safe_names]).flat_map(Names::values);
        files.retain(|id, _| possible().any(|other| other == id));
    }

    fn living(&self) -> Result<()> {
        if self.dead { Err(died()) } else { Ok(()) }
    }

    /// Number of bytes that arrive if the process dies of this change.
    fn start_change(&mut self) -> Result<Option<u64>> {
        self.living()?;
        let change = self.changes;
        self.changes += 1;
        let crash = self.crash.filter(|crash| crash.change == change);
        self.dead = crash.is_some();
        Ok(crash.map(|crash| crash.bytes))
    }

    /// The number of an operation and the fault that strikes it, if any.
    fn strike(&mut self) -> (u64, Option<Fault>) {
        let operation = self.operations;
        self.operations += 1;
        let fault = self.plan.at(operation);
        if let Some(fault) = fault {
            *self.struck.entry(discriminant(&fault)).or_default() += 1;
        }
        (operation, fault)
    }

    fn write(&mut self, name: &str, offset: u64, data: &[u8]) {
        if !self.names.contains_key(name) {
            self.names.insert(name.to_string(), self.files_made);
            self.files.insert(self.files_made, File::default());
            self.files_made += 1;
            self.names_changed();
        }
        let remembers = self.remembers;
        let file = self.files.entry(self.names[name]).or_default();
        put(&mut file.now, to_usize(offset), data);
        if remembers {
            file.unsafe_since.push(Arc::new(Write { offset: to_usize(offset), data: data.to_vec() }));
        }
    }
}

fn died() -> Error {
    Error::other("the process is dead")
}

fn used(state: &State) -> u64 {
    state.names.keys().filter_map(|name| state.length(name)).sum()
}

/// Lets the time of an operation pass, if the disk has time, while others use the disk.
fn pass<'a>(
    disk: &'a SimDisk,
    mut state: MutexGuard<'a, State>,
    is_read: bool,
    fault: &mut Option<Fault>,
) -> Result<MutexGuard<'a, State>> {
    let Some(Time { read, write, hang, wait }) = state.time.clone() else { return Ok(state) };
    let operation = if is_read { read } else { write };
    drop(state);
    match *fault {
        Some(Fault::Hang) => {
            wait(hang);
            *fault = None;
        }
        Some(Fault::Slow { times }) => wait(operation * times),
        _ => wait(operation),
    }
    state = disk.state();
    state.living()?;
    Ok(state)
}

fn put(bytes: &mut Vec<u8>, offset: usize, data: &[u8]) {
    if data.is_empty() {
        return;
    }
    let end = offset + data.len();
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[offset..end].copy_from_slice(data);
}

impl Disk for SimDisk {
    fn names(&self) -> Result<Vec<String>> {
        let state = self.state();
        state.living()?;
        Ok(state.names.keys().cloned().collect())
    }

    fn len(&self, file: &str) -> Result<Option<u64>> {
        let state = self.state();
        state.living()?;
        Ok(state.length(file))
    }

    fn read_at(&self, file: &str, offset: u64, data: &mut [u8]) -> Result<usize> {
        let mut state = self.state();
        state.living()?;
        let (operation, mut fault) = state.strike();
        let bit = state.plan.bit(operation, data.len() as u64);
        state = pass(self, state, true, &mut fault)?;
        let file = state.file(file).ok_or(ErrorKind::NotFound)?;
        let start = to_usize(offset).min(file.now.len());
        let bytes = data.len().min(file.now.len() - start);
        let source = &mut file.now[start..start + bytes];
        match fault {
            Some(Fault::Fail | Fault::Hang) => return Err(Error::other("the medium cannot be read")),
            Some(Fault::BitFlip) => {
                if let Some(byte) = source.get_mut((bit / 8) as usize) {
                    *byte ^= 1 << (bit % 8);
                }
            }
            _ => {}
        }
        data[..bytes].copy_from_slice(source);
        Ok(bytes)
    }

    fn write_at(&self, file: &str, offset: u64, data: &[u8]) -> Result<()> {
        let mut state = self.state();
        if let Some(arrive) = state.start_change()? {
            state.write(file, offset, &data[..data.len().min(to_usize(arrive))]);
            return Err(died());
        }
        let (operation, mut fault) = state.strike();
        state = pass(self, state, false, &mut fault)?;
        match fault {
            Some(Fault::Fail | Fault::Hang) => return Err(Error::other("the medium cannot be written")),
            Some(Fault::Drop | Fault::Stale) => return Ok(()),
            _ => {}
        }
        let length = state.length(file).unwrap_or(0);
        let grows = (offset + data.len() as u64).saturating_sub(length);
        if let Some(room) = state.room_bytes {
            let left = room.saturating_sub(used(&state));
            if grows > left {
                // The part that fits is written, as on a real disk.
                let fits = (data.len() as u64).saturating_sub(grows - left);
                state.write(file, offset, &data[..to_usize(fits)]);
                return Err(ErrorKind::StorageFull.into());
            }
        }
        state.write(file, offset, data);
        if fault == Some(Fault::BitFlip) && !data.is_empty() {
            let bit = state.plan.bit(operation, data.len() as u64);
            if let Some(file) = state.file(file) {
                file.now[to_usize(offset + bit / 8)] ^= 1 << (bit % 8);
            }
        }
        Ok(())
    }

    fn cut(&self, file: &str, bytes: u64) -> Result<()> {
        self.change(|state| {
            if let Some(file) = state.file(file) {
                file.now.truncate(to_usize(bytes));
                file.safe.truncate(to_usize(bytes));
                file.unsafe_since.retain(|write| ((write.offset + write.data.len()) as u64) <= bytes);
            }
            Ok(())
        })
    }

    fn sync(&self, file: &str) -> Result<()> {
        let mut state = self.state();
        state.living()?;
        let file = state.file(file).ok_or(ErrorKind::NotFound)?;
        file.safe = file.now.clone();
        file.unsafe_since.clear();
        Ok(())
    }

    fn sync_names(&self) -> Result<()> {
        let mut state = self.state();
        state.living()?;
        state.safe_names = state.names.clone();
        state.names_since.clear();
        state.forget_nameless();
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.change(|state| {
            let file = state.names.remove(from).ok_or(ErrorKind::NotFound)?;
            state.names.insert(to.to_string(), file);
            state.names_changed();
            Ok(())
        })
    }

    fn remove(&self, file: &str) -> Result<()> {
        self.change(|state| {
            if state.names.remove(file).is_some() {
                state.names_changed();
            }
            Ok(())
        })
    }
}
