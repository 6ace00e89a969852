//! Measures how fast a transport moves blocks between two processes, and the cost to both.
//!
//! ```text
//! wire_bench run --transport tcp --bytes 1048576 --depth 16       target and initiator, here
//! wire_bench target --transport tcp --listen 10.0.0.1:0           prints its descriptor; ends with its stdin
//! wire_bench run --descriptor FILE --bytes 1048576                initiator of a target elsewhere
//! wire_bench memcpy --bytes 1048576 [--regions]                   a copy within one process
//! ```
//!
//! Each `run` and `memcpy` prints one line of JSON. Options: `--op write|read`, `--batch N` pieces of
//! `--bytes` each, `--depth N` batches in flight, `--seconds S`, `--streams N`, `--frame BYTES`, `--window
//! BYTES`, `--memory BYTES` at each end (256 MiB), `--tls` (with certificates made for this run), `--warm
//! BYTES` moved beforehand (all).
//!
//! `--verify` moves KV as instances do: each MiB is copied from 256 MiB into a staging slot, hashed there and
//! written to the other end's slot, which copies it out and compares the copy's hash in the same pass.
//! `--copy` does the same without hashing. Each end then has twice as many slots as pieces in flight.

#[cfg(feature = "tls")]
#[path = "../tests/authority/mod.rs"]
mod authority;

use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Endpoint, Piece, RemoteAccess, TransferId, Transport};
use mixfleet_wire::{HostRegion, Security, Tcp, TcpConfig};
use serde_json::json;
use std::collections::{BTreeMap, VecDeque};
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use twox_hash::XxHash3_64;

/// Of each end's memory: far more than any cache.
const MEMORY_BYTES: u64 = 256 << 20;
/// Bytes copied and hashed at a time, as for an instance's KV.
const PARCEL_BYTES: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

type Outcome<T> = Result<T, Box<dyn Error>>;

struct Options(BTreeMap<String, String>);

impl Options {
    fn parse(words: impl Iterator<Item = String>) -> Outcome<Self> {
        let mut words = words.peekable();
        let mut options = BTreeMap::new();
        while let Some(word) = words.next() {
            let name = word.strip_prefix("--").ok_or(format!("'{word}' is no option"))?;
            let value = words.next_if(|next| !next.starts_with("--")).unwrap_or_default();
            options.insert(name.to_owned(), value);
        }
        Ok(Options(options))
    }

    fn text<'a>(&'a self, name: &str, default: &'a str) -> &'a str {
        self.0.get(name).map_or(default, String::as_str)
    }

    fn number(&self, name: &str, default: u64) -> Outcome<u64> {
        self.0.get(name).map_or(Ok(default), |text| Ok(text.parse().map_err(|e| format!("--{name}: {e}"))?))
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

fn transport(options: &Options) -> Outcome<Box<dyn Transport>> {
    Ok(match options.text("transport", "tcp") {
        "shm" => shm()?,
        "tcp" => {
            let listen = options.text("listen", "127.0.0.1:0").parse()?;
            let mut config = TcpConfig::new(listen, security(options)?);
            config.streams = options.number("streams", config.streams.into())?.try_into()?;
            config.frame_bytes_max = options.number("frame", config.frame_bytes_max)?;
            config.window_bytes = options.number("window", config.window_bytes)?;
            Box::new(Tcp::new(config)?)
        }
        other => return Err(format!("no transport '{other}': shm or tcp").into()),
    })
}

fn security(options: &Options) -> Outcome<Security> {
    if let Some(folder) = options.0.get("tls") {
        return tls(folder);
    }
    Ok(if options.has("insecure") { Security::Insecure } else { Security::LoopbackOnly })
}

/// Where the certificates of this run lie.
struct Certificates(std::path::PathBuf);

impl Drop for Certificates {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An authority, and one member's certificate that both ends show.
#[cfg(feature = "tls")]
fn make_certificates() -> Outcome<Certificates> {
    let folder = std::env::temp_dir().join(format!("mixfleet-wire-bench-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let made = Certificates(folder);
    let authority = authority::Authority::new();
    let (certificate, key) = authority.signs(&["mixfleet"]);
    std::fs::write(made.0.join("authority.pem"), authority.pem())?;
    std::fs::write(made.0.join("member.pem"), certificate)?;
    std::fs::write(made.0.join("key.pem"), key)?;
    Ok(made)
}

#[cfg(feature = "tls")]
fn tls(folder: &str) -> Outcome<Security> {
    let text = |name: &str| std::fs::read_to_string(std::path::Path::new(folder).join(name));
    let pem = mixfleet_wire::TlsPem {
        authority: &text("authority.pem")?,
        certificates: &text("member.pem")?,
        key: &text("key.pem")?,
        revoked: "",
        fleet: "mixfleet",
    };
    Ok(Security::Tls(Arc::new(mixfleet_wire::TlsIdentity::new(&pem)?)))
}

#[cfg(not(feature = "tls"))]
fn make_certificates() -> Outcome<Certificates> {
    Err("built without TLS: --features tls".into())
}

#[cfg(not(feature = "tls"))]
fn tls(_folder: &str) -> Outcome<Security> {
    Err("built without TLS: --features tls".into())
}

#[cfg(target_os = "linux")]
fn shm() -> Outcome<Box<dyn Transport>> {
    Ok(Box::new(mixfleet_wire::Shm::new()?))
}

#[cfg(not(target_os = "linux"))]
fn shm() -> Outcome<Box<dyn Transport>> {
    Err("shm is on Linux only".into())
}

/// Memory whose pages are there.
fn memory(options: &Options, byte: u8) -> Outcome<Arc<HostRegion>> {
    let bytes = options.number("memory", MEMORY_BYTES)?;
    let region = HostRegion::new(bytes as usize)?;
    region.update(0, bytes, &mut |all| all.fill(byte))?;
    Ok(Arc::new(region))
}

fn say(line: &serde_json::Value) -> Outcome<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// Lets others reach its memory until its stdin ends. A line `offset bytes hash` there is answered once these
/// bytes were copied, with whether the copy has that hash; without a hash it is not hashed.
fn target(options: &Options) -> Outcome<()> {
    let transport = transport(options)?;
    let memory = memory(options, 1)?;
    let private = HostRegion::new(PARCEL_BYTES as usize)?;
    let descriptor = transport.register(memory.clone(), RemoteAccess::ReadWrite)?;
    say(&json!({"pid": std::process::id(), "descriptor": descriptor}))?;
    for line in std::io::stdin().lines() {
        let line = line?;
        let numbers: Vec<u64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let [offset, bytes, ref hash @ ..] = numbers[..] else {
            return Err(format!("'{line}' is no piece").into());
        };
        let mut intact = Ok(false);
        memory.view(offset, bytes, &mut |parcel| {
            intact = match hash.first() {
                Some(&hash) => private.store_hashed(0, parcel).map(|copy_hash| copy_hash == hash),
                None => private.store(0, parcel).map(|()| true),
            };
        })?;
        say(&json!(intact?))?;
    }
    transport.deregister(&descriptor)?;
    Ok(())
}

/// The other process.
struct Target {
    pid: u64,
    descriptor: Descriptor,
    child: Option<(Child, BufReader<std::process::ChildStdout>)>,
}

impl Target {
    fn find(options: &Options) -> Outcome<Self> {
        let (line, child) = match options.0.get("descriptor") {
            Some(path) => (std::fs::read_to_string(path)?, None),
            None => {
                let mut child = Command::new(std::env::current_exe()?)
                    .args(["target", "--transport", options.text("transport", "tcp")])
                    .args(["--memory", options.text("memory", &MEMORY_BYTES.to_string())])
                    .args(options.0.get("tls").iter().flat_map(|folder| ["--tls", folder.as_str()]))
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .spawn()?;
                let mut lines = BufReader::new(child.stdout.take().ok_or("no stdout")?);
                let mut line = String::new();
                lines.read_line(&mut line)?;
                (line, Some((child, lines)))
            }
        };
        let told: serde_json::Value = serde_json::from_str(&line)?;
        let descriptor = serde_json::from_value(told["descriptor"].clone())?;
        Ok(Target { pid: told["pid"].as_u64().ok_or("no pid")?, descriptor, child })
    }

    /// Asks it to take a piece that has arrived.
    fn ask(&mut self, Parcel { offset, bytes, hash }: &Parcel) -> Outcome<()> {
        let (child, _) =
            self.child.as_mut().ok_or("--copy and --verify need a target that was started here")?;
        let stdin = child.stdin.as_mut().ok_or("no stdin")?;
        let hash = hash.map(|hash| hash.to_string()).unwrap_or_default();
        Ok(writeln!(stdin, "{offset} {bytes} {hash}")?)
    }

    fn answer(&mut self) -> Outcome<()> {
        let (_, lines) = self.child.as_mut().ok_or("no target")?;
        let mut line = String::new();
        lines.read_line(&mut line)?;
        if line.trim() == "true" { Ok(()) } else { Err(format!("a block arrived damaged: {line}").into()) }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some((child, _)) = &mut self.child {
            child.stdin = None;
            let _ = child.wait();
        }
    }
}

/// User and system time of a process; Linux counts in hundredths of a second.
fn cpu_seconds(pid: u64) -> f64 {
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after_name.split_whitespace().skip(11).take(2).filter_map(|word| word.parse::<f64>().ok());
    ticks.sum::<f64>() / TICKS_PER_SECOND
}

/// Bytes in a slot.
struct Parcel {
    offset: u64,
    bytes: u64,
    hash: Option<u64>,
}

/// The data that is moved repeatedly.
struct Work {
    memory_bytes: u64,
    reads: bool,
    piece_bytes: u64,
    batch: u64,
    /// Where pieces are copied from; empty if they are not copied.
    source: Vec<u8>,
    verify: bool,
    at: u64,
}

impl Work {
    fn next(&mut self) -> Vec<Piece> {
        let slots = self.memory_bytes / self.piece_bytes;
        let pieces = (0..self.batch).map(|i| {
            let place = (self.at + i) % slots * self.piece_bytes;
            Piece { local: place, remote: place, bytes: self.piece_bytes }
        });
        let pieces = pieces.collect();
        self.at += self.batch;
        pieces
    }

    fn begin(&mut self, way: &mut dyn Endpoint, local: &HostRegion) -> Outcome<(TransferId, Vec<Parcel>)> {
        let (first, pieces) = (self.at, self.next());
        let mut parcels = Vec::new();
        if !self.source.is_empty() {
            for (at, piece) in (first..).zip(&pieces) {
                self.fill(at, piece, local, &mut parcels)?;
            }
        }
        Ok((if self.reads { way.read(&pieces) } else { way.write(&pieces) }?, parcels))
    }

    /// Copies a piece into its slot.
    fn fill(&self, at: u64, piece: &Piece, local: &HostRegion, parcels: &mut Vec<Parcel>) -> Outcome<()> {
        let from = at % (self.source.len() as u64 / self.piece_bytes) * self.piece_bytes;
        let whole = &self.source[from as usize..(from + piece.bytes) as usize];
        for (from, offset) in
            whole.chunks(PARCEL_BYTES as usize).zip((piece.local..).step_by(PARCEL_BYTES as usize))
        {
            let (bytes, mut hash) = (from.len() as u64, None);
            local.update(offset, bytes, &mut |place| {
                place.copy_from_slice(from);
                hash = self.verify.then(|| XxHash3_64::oneshot(place));
            })?;
            parcels.push(Parcel { offset, bytes, hash });
        }
        Ok(())
    }
}

struct Under {
    since: Instant,
    transfer: TransferId,
    parcels: Vec<Parcel>,
}

#[expect(clippy::too_many_lines, reason = "one benchmark after the other")]
fn run(options: &mut Options) -> Outcome<()> {
    let certificates = if options.has("tls") { Some(make_certificates()?) } else { None };
    if let Some(Certificates(folder)) = &certificates {
        options.0.insert("tls".into(), folder.to_string_lossy().into_owned());
    }
    let (piece_bytes, batch) = (options.number("bytes", 1 << 20)?, options.number("batch", 1)?);
    let depth = options.number("depth", 1)?;
    let reads = options.text("op", "write") == "read";
    let verify = options.has("verify");
    let copies = verify || options.has("copy");
    if copies {
        if reads {
            return Err("--copy and --verify are for --op write".into());
        }
        let slots = 2 * depth * batch * piece_bytes;
        options.0.insert("memory".into(), slots.next_multiple_of(4 << 20).to_string());
    }
    let transport = transport(options)?;
    let local = memory(options, 2)?;
    let mut target = Target::find(options)?;
    let mut way = transport.connect(local.clone(), &target.descriptor)?;
    let mut work = Work {
        memory_bytes: local.size_bytes(),
        reads,
        piece_bytes,
        batch,
        source: if copies { vec![3; MEMORY_BYTES as usize] } else { Vec::new() },
        verify,
        at: 0,
    };
    let depth = depth as usize;
    let time = Duration::from_secs_f64(options.text("seconds", "1").parse()?);
    // Once over all of both memories: the first touch of a page costs more than a copy.
    for place in (0..options.number("warm", local.size_bytes())?).step_by(4 << 20) {
        let piece = [Piece { local: place, remote: place, bytes: 4 << 20 }];
        let transfer = if reads { way.read(&piece) } else { way.write(&piece) }?;
        way.wait(transfer, LONG)?;
    }
    let cpu = |target: &Target| (cpu_seconds(std::process::id().into()), cpu_seconds(target.pid));
    let (before, start) = (cpu(&target), Instant::now());
    let (mut under, mut latencies_us, mut asked) = (VecDeque::new(), Vec::new(), 0u64);
    while start.elapsed() < time || !under.is_empty() {
        if start.elapsed() < time && under.len() < depth {
            let since = Instant::now();
            let (transfer, parcels) = work.begin(&mut *way, &local)?;
            under.push_back(Under { since, transfer, parcels });
            if under.len() < depth {
                continue;
            }
        }
        if let Some(Under { since, transfer, parcels }) = under.pop_front() {
            way.wait(transfer, LONG)?;
            latencies_us.push(since.elapsed().as_secs_f64() * 1e6);
            for parcel in &parcels {
                target.ask(parcel)?;
                asked += 1;
            }
            // the other end may hold as many slots as are in flight, so that both ends work at once
            while asked > depth as u64 * work.batch * work.piece_bytes.div_ceil(PARCEL_BYTES) {
                target.answer()?;
                asked -= 1;
            }
        }
    }
    (0..asked).try_for_each(|_| target.answer())?;
    let seconds = start.elapsed().as_secs_f64();
    let after = cpu(&target);
    let bytes = latencies_us.len() as f64 * (work.piece_bytes * work.batch) as f64;
    latencies_us.sort_by(f64::total_cmp);
    let quantile = |q: f64| latencies_us[((latencies_us.len() - 1) as f64 * q) as usize];
    say(&json!({
        "schema": "mixfleet.wire_bench.v1", "transport": transport.name(), "op": options.text("op", "write"),
        "bytes": work.piece_bytes, "batch": work.batch, "depth": depth, "streams": options.number("streams", 0)?,
        "copy": copies, "verify": verify, "tls": options.has("tls"), "gb_per_s": bytes / seconds / 1e9,
        "latency_us_p50": quantile(0.5), "latency_us_p99": quantile(0.99), "batches": latencies_us.len(),
        "seconds": seconds, "initiator_cpu_s": after.0 - before.0, "target_cpu_s": after.1 - before.1,
    }))
}

/// Copies between two memories of this process: two vectors, or two of the regions that `shm` joins.
fn copies(options: &Options) -> Outcome<()> {
    let bytes = options.number("bytes", 1 << 20)?;
    let time = Duration::from_secs_f64(options.text("seconds", "1").parse()?);
    let (from, mut to) = (vec![1u8; MEMORY_BYTES as usize], vec![2u8; MEMORY_BYTES as usize]);
    let (shared_from, shared_to) = (memory(options, 1)?, memory(options, 2)?);
    let own = || cpu_seconds(std::process::id().into());
    let mut rate = |regions: bool| -> Outcome<serde_json::Value> {
        let before = own();
        let (start, mut at, mut moved) = (Instant::now(), 0, 0u64);
        while start.elapsed() < time {
            let (first, end) = (at as usize, (at + bytes) as usize);
            if regions {
                shared_from.view(at, bytes, &mut |from| {
                    let _ = shared_to.update(at, bytes, &mut |to| to.copy_from_slice(from));
                })?;
            } else {
                to[first..end].copy_from_slice(std::hint::black_box(&from[first..end]));
                std::hint::black_box(&mut to);
            }
            moved += bytes;
            at = if at + 2 * bytes <= MEMORY_BYTES { at + bytes } else { 0 };
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(json!({
            "schema": "mixfleet.wire_memcpy.v1", "regions": regions, "bytes": bytes,
            "gb_per_s": moved as f64 / seconds / 1e9, "seconds": seconds, "initiator_cpu_s": own() - before,
        }))
    };
    rate(false)?;
    say(&rate(options.has("regions"))?)
}

fn main() -> Outcome<()> {
    let mut words = std::env::args().skip(1);
    let verb = words.next().unwrap_or_default();
    let mut options = Options::parse(words)?;
    match verb.as_str() {
        "run" => run(&mut options),
        "target" => target(&options),
        "memcpy" => copies(&options),
        _ => Err("wire_bench run|target|memcpy [--option value]...; the head of its source has all".into()),
    }
}
