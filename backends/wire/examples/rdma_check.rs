//! Checks RDMA on real or emulated NICs: one line for each check, and an exit status.
//!
//! `self` needs one NIC. `server ADDRESS` serves one region until its standard input ends, and prints how to
//! reach it; `client` and `bench` take that line.

#![allow(clippy::print_stdout)]

#[path = "../tests/authority/mod.rs"]
mod authority;

use authority::Authority;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Endpoint, Piece, RemoteAccess, Transport};
use mixfleet_hal::{Error, ErrorKind};
use mixfleet_wire::verbs::{Verbs, VerbsOptions};
use mixfleet_wire::{HostRegion, Security};
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const USAGE: &str = "\
usage: rdma_check self                      all checks within this machine
       rdma_check server ADDRESS            serve a region at ADDRESS (an IP of this host) until stdin ends
       rdma_check client DESCRIPTOR         the checks between two machines
       rdma_check bench DESCRIPTOR SLICE_BYTES DEPTH QUEUE_PAIRS MEGABYTES SPIN_US
       rdma_check cut DESCRIPTOR COMMAND..  writes fail clearly after COMMAND, which cuts the link or the peer
       rdma_check absent WORDS              no device opens, and the reason has WORDS
       rdma_check certificates FOLDER NAME..  writes a fleet's authority and one member of these names and addresses";

/// Size of every region, and of what moves in a check: it has more slices than a queue is deep.
const BYTES: usize = 8 << 20;
/// Longer than any retry of a NIC: a wait that reaches it has failed.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longest that an error may take.
const BOUND: Duration = Duration::from_secs(10);

type Outcome = Result<String, String>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        ["self"] => within(),
        ["server", address] => address.parse().map_err(|e| format!("{address}: {e}")).and_then(serve),
        ["client", descriptor] => parse(descriptor).and_then(|region| between(&region)),
        ["absent", words] => absent(words),
        ["certificates", folder, ref names @ ..] => certificates(Path::new(folder), names),
        ["cut", descriptor, ref command @ ..] if !command.is_empty() => {
            parse(descriptor).and_then(|region| Checks::run(|checks| checks.cut(&region, command)))
        }
        ["bench", descriptor, ref numbers @ ..] => match numbers.iter().map(|n| n.parse().ok()).collect() {
            Some(numbers) => parse(descriptor).and_then(|region| bench(&region, numbers)),
            None => return usage(),
        },
        _ => return usage(),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(why) => {
            eprintln!("rdma_check: {why}");
            ExitCode::from(3)
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("{USAGE}");
    ExitCode::from(2)
}

fn parse(descriptor: &str) -> Result<Descriptor, String> {
    serde_json::from_str(descriptor).map_err(|error| format!("the descriptor does not parse: {error}"))
}

fn open(listen: Option<SocketAddr>) -> Result<Verbs, String> {
    // the check's network has no other users
    let security = Security::Insecure;
    Verbs::open(VerbsOptions { listen, security, ..VerbsOptions::default() }).map_err(|absent| absent.reason)
}

/// Bytes in which every 8 encode their position and `seed`.
fn pattern(seed: u64) -> Vec<u8> {
    let word = |i: u64| (i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..BYTES as u64 / 8).flat_map(word).collect()
}

fn region() -> Result<Arc<HostRegion>, String> {
    HostRegion::new(BYTES).map(Arc::new).map_err(|error| error.to_string())
}

fn filled(seed: u64) -> Result<Arc<HostRegion>, String> {
    let memory = region()?;
    memory.store(0, &pattern(seed)).map_err(|error| error.to_string())?;
    Ok(memory)
}

fn holds(memory: &HostRegion, seed: u64) -> Outcome {
    let mut same = false;
    let look = &mut |bytes: &[u8]| same = bytes == pattern(seed);
    memory.view(0, BYTES as u64, look).map_err(|error| error.to_string())?;
    if same { Ok(format!("{BYTES} bytes")) } else { Err("other bytes arrived than were sent".into()) }
}

const ALL: Piece = Piece { local: 0, remote: 0, bytes: BYTES as u64 };
const ONE: Piece = Piece { local: 0, remote: 0, bytes: 4096 };

/// Whether `result` failed in time as `kind`, with `words` in its text.
fn fails(begin: Instant, result: Result<(), Error>, kind: ErrorKind, words: &[&str]) -> Outcome {
    let took = begin.elapsed();
    match result {
        Ok(()) => Err("it went through".into()),
        Err(error) if error.kind != kind => Err(format!("{:?} instead of {kind:?}: {error}", error.kind)),
        Err(error) if !words.iter().any(|word| error.detail.contains(word)) => {
            Err(format!("none of {words:?} in: {error}"))
        }
        Err(_) if took > BOUND => Err(format!("only after {took:.1?}")),
        Err(error) => Ok(format!("after {} ms: {error}", took.as_millis())),
    }
}

/// Writes and waits.
fn write(way: &mut dyn Endpoint, piece: Piece) -> Result<(), Error> {
    let transfer = way.write(&[piece])?;
    way.wait(transfer, PATIENCE)
}

/// Counts the checks that failed.
#[derive(Default)]
struct Checks {
    failed: usize,
}

impl Checks {
    /// Whether all checks of `body` passed.
    fn run(body: impl FnOnce(&mut Self) -> Result<(), String>) -> Result<bool, String> {
        let mut checks = Checks::default();
        body(&mut checks)?;
        Ok(checks.failed == 0)
    }

    fn check(&mut self, name: &str, outcome: Outcome) {
        match outcome {
            Ok(detail) => println!("ok      {name}: {detail}"),
            Err(why) => {
                self.failed += 1;
                println!("FAILED  {name}: {why}");
            }
        }
    }

    /// Bytes there and back.
    fn round_trip(&mut self, verbs: &Verbs, descriptor: &Descriptor) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let (source, back) = (filled(1)?, region()?);
        let mut way = verbs.connect_verbs(source.clone(), descriptor).map_err(text)?;
        self.check("write", write(&mut way, ALL).map_err(text).map(|()| "complete".into()));
        let mut reader = verbs.connect_verbs(back.clone(), descriptor).map_err(text)?;
        let read = reader.read(&[ALL]).and_then(|transfer| reader.wait(transfer, PATIENCE));
        self.check("read", read.map_err(text).and_then(|()| holds(&back, 1)));
        Ok(())
    }

    fn notices(&mut self, verbs: &Verbs, descriptor: &Descriptor, there: &HostRegion) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let mut way = verbs.connect_verbs(filled(2)?, descriptor).map_err(text)?;
        let pieces: Vec<Piece> = (0..64u64)
            .map(|i| Piece { local: i * ALL.bytes / 64, remote: i * ALL.bytes / 64, bytes: ALL.bytes / 64 })
            .collect();
        let sent = way.write_with_immediate(&pieces, 0x1234_5678).map_err(text)?;
        // the sender must wait, for only then it sends what did not fit its queue
        let (complete, came) = std::thread::scope(|scope| {
            let complete = scope.spawn(|| way.wait(sent, PATIENCE));
            let came = verbs.notice(descriptor, PATIENCE).map(|notice| (notice, holds(there, 2)));
            (complete.join(), came)
        });
        let (notice, landed) = came.map_err(text)?;
        let landed = if notice == Some(0x1234_5678) { landed } else { Err(format!("{notice:?} came")) };
        self.check("write with immediate: all has landed at the notice", landed);
        let complete = complete.map_err(|_| "the sender panicked".to_string())?;
        self.check("write with immediate: complete", complete.map_err(text).map(|()| "yes".into()));
        Ok(())
    }

    /// Notices that are not consumed stop the sender.
    fn unread_notices(&mut self, verbs: &Verbs) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let there = verbs.register(region()?, RemoteAccess::Write).map_err(text)?;
        let mut way = verbs.connect_verbs(region()?, &there).map_err(text)?;
        let begin = Instant::now();
        let mut sent = 0;
        let stopped = loop {
            let transfer = way.write_with_immediate(&[], sent);
            match transfer.and_then(|transfer| way.wait(transfer, PATIENCE)) {
                Ok(()) if begin.elapsed() > BOUND => break Ok(()),
                Ok(()) => sent += 1,
                Err(error) => break Err(error),
            }
        };
        self.check("unread notices", fails(begin, stopped, ErrorKind::Other, &["RNR_RETRY_EXC_ERR"]));
        let mut read = 0;
        while verbs.notice(&there, Duration::ZERO).map_err(text)?.is_some() {
            read += 1;
        }
        let all = if read == sent { Ok(format!("{read}")) } else { Err(format!("{read} of {sent}")) };
        self.check("unread notices wait", all);
        verbs.deregister(&there).map_err(text)
    }

    /// Keys that are refused: one of an old epoch on a healthy queue pair, and an invented one.
    fn wrong_keys(&mut self, verbs: &Verbs) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let there = region()?;
        let old = verbs.register(there.clone(), RemoteAccess::ReadWrite).map_err(text)?;
        let half = verbs.open_half(filled(3)?, &old).map_err(text)?;
        let (old_answer, old_way) = verbs.accept(half.offer()).map_err(text)?;
        drop((half, old_way));
        let mut late = verbs.connect_verbs(filled(3)?, &old).map_err(text)?;
        let new = verbs.register(there.clone(), RemoteAccess::ReadWrite).map_err(text)?;
        let begin = Instant::now();
        self.check(
            "old epoch: the old way is closed",
            fails(
                begin,
                write(&mut late, ONE),
                ErrorKind::Closed,
                &["the peer closed the connection", "RETRY_EXC_ERR"],
            ),
        );
        let begin = Instant::now();
        let refused = verbs.connect(filled(3)?, &old).map(|_| ());
        self.check("old epoch: no new way", fails(begin, refused, ErrorKind::Closed, &["epoch"]));
        let keys = old_answer
            .rails
            .iter()
            .map(|rail| ("old epoch: its key on the new epoch's way", rail.remote_key));
        for (name, key) in keys.chain([("wrong key", 0x0bad_0bad)]) {
            let half = verbs.open_half(filled(3)?, &new).map_err(text)?;
            let (mut answer, _way) = verbs.accept(half.offer()).map_err(text)?;
            answer.rails.iter_mut().for_each(|rail| rail.remote_key = key);
            let mut way = half.join(&answer).map_err(text)?;
            let begin = Instant::now();
            self.check(name, fails(begin, write(&mut way, ONE), ErrorKind::Closed, &["REM_ACCESS_ERR"]));
            self.check(
                "a broken way stays broken",
                fails(Instant::now(), write(&mut way, ONE), ErrorKind::Closed, &["REM_ACCESS_ERR"]),
            );
        }
        let mut zeros = false;
        there.view(0, ALL.bytes, &mut |bytes| zeros = bytes.iter().all(|&byte| byte == 0)).map_err(text)?;
        let untouched = if zeros { Ok("as before".into()) } else { Err("something was written".into()) };
        self.check("refused writes left the memory alone", untouched);
        verbs.deregister(&new).map_err(text)
    }

    /// A peer whose loss only the NIC can report, since there is no connection.
    fn silent_peer(&mut self, verbs: &Verbs) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let there = verbs.register(region()?, RemoteAccess::Write).map_err(text)?;
        let half = verbs.open_half(filled(4)?, &there).map_err(text)?;
        let (answer, way) = verbs.accept(half.offer()).map_err(text)?;
        let mut late = half.join(&answer).map_err(text)?;
        drop(way);
        let begin = Instant::now();
        self.check(
            "dead peer, only the NIC can tell",
            fails(begin, write(&mut late, ONE), ErrorKind::Closed, &["RETRY_EXC_ERR"]),
        );
        verbs.deregister(&there).map_err(text)
    }

    fn killed_peer(&mut self, verbs: &Verbs) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let mut peer = Server::start()?;
        let mut way = verbs.connect_verbs(filled(5)?, &peer.descriptor).map_err(text)?;
        self.check("another process: write", write(&mut way, ALL).map_err(text).map(|()| "complete".into()));
        let many = vec![ALL; 16];
        let transfer = way.write(&many).map_err(text)?;
        peer.kill()?;
        let begin = Instant::now();
        self.check(
            "peer killed (-9) in the middle",
            fails(
                begin,
                way.wait(transfer, PATIENCE),
                ErrorKind::Closed,
                &["closed the connection", "RETRY_EXC_ERR"],
            ),
        );
        let begin = Instant::now();
        let again = verbs.connect(filled(5)?, &peer.descriptor).map(|_| ());
        self.check("a killed peer does not answer", fails(begin, again, ErrorKind::Closed, &["connection"]));
        Ok(())
    }

    /// A write after `command` cut the link under an open way.
    fn cut(&mut self, descriptor: &Descriptor, command: &[&str]) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let verbs = open(None)?;
        let mut way = verbs.connect_verbs(filled(6)?, descriptor).map_err(text)?;
        self.check("a way: write", write(&mut way, ONE).map_err(text).map(|()| "complete".into()));
        let status = Command::new(command[0]).args(&command[1..]).status();
        let status = status.map_err(|error| format!("{}: {error}", command[0]))?;
        if !status.success() {
            return Err(format!("{} failed: {status}", command.join(" ")));
        }
        let words = ["RETRY_EXC_ERR", "LOC_QP_OP_ERR", "closed the connection"];
        // what cuts the link may take a moment
        let cut = Instant::now();
        let (begin, result) = loop {
            let begin = Instant::now();
            let result = write(&mut way, ONE);
            if result.is_err() || cut.elapsed() > BOUND {
                break (begin, result);
            }
        };
        self.check(
            &format!("write after '{}'", command.join(" ")),
            fails(begin, result, ErrorKind::Closed, &words),
        );
        Ok(())
    }
}

/// Whether no device opens, and the reason has `words`.
fn absent(words: &str) -> Result<bool, String> {
    Checks::run(|checks| {
        let outcome = match open(None) {
            Ok(_) => Err("a device opens".into()),
            Err(reason) if reason.contains(words) => Ok(reason),
            Err(reason) => Err(reason),
        };
        checks.check("no device opens", outcome);
        Ok(())
    })
}

fn within() -> Result<bool, String> {
    let verbs = open(Some(SocketAddr::from(([127, 0, 0, 1], 0))))?;
    for (name, mtu_bytes) in verbs.devices() {
        println!("{name}: packets of {mtu_bytes} bytes");
    }
    Checks::run(|checks| {
        let text = |error: Error| error.to_string();
        let there = region()?;
        let descriptor = verbs.register(there.clone(), RemoteAccess::ReadWrite).map_err(text)?;
        checks.round_trip(&verbs, &descriptor)?;
        checks.check("write: landed", holds(&there, 1));
        checks.notices(&verbs, &descriptor, &there)?;
        verbs.deregister(&descriptor).map_err(text)?;
        checks.unread_notices(&verbs)?;
        checks.wrong_keys(&verbs)?;
        checks.silent_peer(&verbs)?;
        checks.killed_peer(&verbs)
    })
}

/// Against a server on another machine.
fn between(descriptor: &Descriptor) -> Result<bool, String> {
    let verbs = open(None)?;
    Checks::run(|checks| {
        checks.round_trip(&verbs, descriptor)?;
        let wrong = Descriptor { epoch: descriptor.epoch + 1, ..descriptor.clone() };
        let begin = Instant::now();
        let refused = verbs.connect(region()?, &wrong).map(|_| ());
        checks.check("wrong epoch", fails(begin, refused, ErrorKind::Closed, &["epoch"]));
        Ok(())
    })
}

fn serve(address: std::net::IpAddr) -> Result<bool, String> {
    let verbs = open(Some(SocketAddr::new(address, 0)))?;
    let descriptor = verbs.register(region()?, RemoteAccess::ReadWrite).map_err(|error| error.to_string())?;
    println!("{}", serde_json::to_string(&descriptor).map_err(|error| error.to_string())?);
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest).map_err(|error| error.to_string())?;
    verbs.deregister(&descriptor).map_err(|error| error.to_string())?;
    Ok(true)
}

/// This program as a server on this machine.
struct Server {
    child: Child,
    descriptor: Descriptor,
}

impl Server {
    fn start() -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(program);
        command.args(["server", "127.0.0.1"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("a server process: {error}"))?;
        let stdout = child.stdout.take().ok_or("a server without output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).map_err(|error| error.to_string())?;
        Ok(Server { child, descriptor: parse(&line)? })
    }

    fn kill(&mut self) -> Result<(), String> {
        self.child.kill().and_then(|()| self.child.wait()).map_err(|error| error.to_string())?;
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // it may have ended already
        let _ = self.kill();
    }
}

/// Writes the given bytes in messages of one size and prints the rate, as `ib_write_bw` counts it.
fn bench(descriptor: &Descriptor, numbers: Vec<u32>) -> Result<bool, String> {
    let text = |error: Error| error.to_string();
    let [slice_bytes, depth, queue_pairs, megabytes, spin_us] = numbers[..] else { return Err(USAGE.into()) };
    if slice_bytes == 0 || slice_bytes as usize > BYTES {
        return Err(format!("messages of {slice_bytes} bytes; 1 to {BYTES} fit the region"));
    }
    let (queue_pairs, spin) = (queue_pairs as usize, Duration::from_micros(spin_us.into()));
    let security = Security::Insecure;
    let options = VerbsOptions { slice_bytes, depth, queue_pairs, spin, security, ..VerbsOptions::default() };
    let verbs = Verbs::open(options).map_err(|absent| absent.reason)?;
    let mut way = verbs.connect_verbs(filled(7)?, descriptor).map_err(text)?;
    // each message to the same place, as `ib_write_bw` does
    let message = Piece { local: 0, remote: 0, bytes: slice_bytes.into() };
    let pieces = vec![message; (u64::from(megabytes) * 1_000_000).div_ceil(message.bytes) as usize];
    write(&mut way, message).map_err(text)?;
    let begin = Instant::now();
    let transfer = way.write(&pieces).map_err(text)?;
    way.wait(transfer, Duration::from_secs(120)).map_err(text)?;
    let seconds = begin.elapsed().as_secs_f64();
    println!("{:.2} MB/s", pieces.len() as f64 * message.bytes as f64 / seconds / 1e6);
    Ok(true)
}

/// `ca.pem`, `member.pem` and `member.key`, for processes that find each other under TLS.
fn certificates(folder: &Path, names: &[&str]) -> Result<bool, String> {
    let authority = Authority::new();
    let (certificate, key) = authority.signs(names);
    for (name, pem) in [("ca.pem", authority.pem()), ("member.pem", certificate), ("member.key", key)] {
        let file = folder.join(name);
        std::fs::write(&file, pem).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(true)
}
