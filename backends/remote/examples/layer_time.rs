//! Measures what a connection adds to a layer of attention on a device of another process, beside what a
//! round trip and the bandwidth of the same kind of connection allow. Run `cargo run -p mixfleet-remote
//! --example layer_time`.
//!
//! A layer is: write queries, keys and values, run a command of negligible time, and read the attention
//! output. The difference between a local and a remote device is the cost of the connection.
//!
//! Over a port of this host, and over pages that both processes share, each beside a ping-pong over the same
//! connection. The ends may be on different hosts: `layer_time lend HOST:PORT` and `layer_time echo
//! HOST:PORT` there, and `layer_time to HOST:PORT HOST:PORT` here with both addresses. Over a pair of virtual
//! cards with a round trip of 50 us, as root, where the kernel has netem:
//!
//! ```sh
//! ip netns add far
//! ip link add near type veth peer name there netns far
//! ip addr add 10.99.0.1/24 dev near && ip link set near up && tc qdisc add dev near root netem delay 25us
//! ip -n far addr add 10.99.0.2/24 dev there && ip -n far link set there up
//! ip netns exec far tc qdisc add dev there root netem delay 25us
//! ip netns exec far layer_time lend 10.99.0.2:7001 & ip netns exec far layer_time echo 10.99.0.2:7002 &
//! layer_time to 10.99.0.2:7001 10.99.0.2:7002
//! ```

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "an example says what it measured")]
#![warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)]

use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{Backend, BufferUsage, Cmd, Device, OpSig, Result, Slice};
use mixfleet_remote::{DeviceAccess, DeviceServer, RemoteDevice, SharedSecret, Shown};
use mixfleet_wire::{Duplex, DuplexListener, LinkAddress, Security};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);
const ROUNDS: usize = 2000;

/// Lets everybody on this host in: there is nothing to protect.
struct Open;

impl SharedSecret for Open {
    fn prove(&self, _: &LinkAddress, _: &[u8]) -> Option<Shown> {
        Some(Shown { proof: Vec::new(), is_answered: Box::new(|_| true) })
    }
    fn admit(&self, _: &[u8], _: &LinkAddress, _: &[u8]) -> Option<Vec<u8>> {
        Some(Vec::new())
    }
}

/// Nothing but a measurement is on another network than this host's own.
fn security(address: &LinkAddress) -> Security {
    match address {
        LinkAddress::Tcp(port) if !port.ip().is_loopback() => Security::Insecure,
        _ => Security::LoopbackOnly,
    }
}

fn access(address: &LinkAddress) -> DeviceAccess {
    DeviceAccess { security: security(address), secret: Some(Arc::new(Open)) }
}

fn address(text: &str) -> LinkAddress {
    match LinkAddress::path_in(text) {
        Some(path) => LinkAddress::Unix(path.to_owned()),
        None => LinkAddress::Tcp(text.parse().expect("HOST:PORT, or unix:PATH")),
    }
}

fn here() -> LinkAddress {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()
}

/// A socket file of this run.
fn file(role: &str) -> LinkAddress {
    LinkAddress::Unix(std::env::temp_dir().join(format!("layer-time-{}-{role}", std::process::id())))
}

/// This program again, as `role`, and the address that it serves.
fn other(role: &str, at: &LinkAddress) -> (Child, LinkAddress) {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    let mut child = command.args([role, &at.to_string()]).stdout(Stdio::piped()).spawn().expect("a process");
    let mut line = String::new();
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    out.read_line(&mut line).expect("a line");
    (child, address(line.trim()))
}

/// A connection that carries nothing but the bytes of a ping-pong: a socket, or shared pages.
enum Plain {
    Socket(TcpStream),
    Pages(Duplex),
}

impl Plain {
    fn socket(socket: TcpStream) -> Self {
        socket.set_nodelay(true).expect("an option");
        Plain::Socket(socket)
    }

    /// Connects to the echo process at `address`.
    fn call(address: &LinkAddress) -> Result<Self> {
        if let LinkAddress::Tcp(port) = address {
            return Ok(Plain::socket(TcpStream::connect(port).expect("a peer")));
        }
        let deadline = Instant::now() + TIMEOUT;
        Duplex::call(address, &Security::LoopbackOnly, TIMEOUT, deadline).map(Plain::Pages)
    }

    /// Waits for a caller at `address`, which is printed.
    fn welcome(address: &LinkAddress) -> Self {
        if let LinkAddress::Tcp(port) = address {
            let listener = TcpListener::bind(port).expect("a port");
            println!("{}", listener.local_addr().expect("an address"));
            return Plain::socket(listener.accept().expect("a caller").0);
        }
        let listener = DuplexListener::bind(address, Security::LoopbackOnly, TIMEOUT).expect("a path");
        println!("{}", listener.address());
        let welcomed = listener.accept().and_then(|caller| caller.welcome(Instant::now() + TIMEOUT));
        Plain::Pages(welcomed.expect("a caller").0)
    }

    fn send(&mut self, bytes: &[u8]) {
        match self {
            Plain::Socket(socket) => socket.write_all(bytes).expect("a peer"),
            Plain::Pages(link) => link.send(&[bytes], TIMEOUT, &mut || Ok(false)).expect("a peer"),
        }
    }

    /// Receives all of `place`.
    fn fill(&mut self, place: &mut [u8]) -> std::io::Result<()> {
        match self {
            Plain::Socket(socket) => socket.read_exact(place),
            Plain::Pages(link) => {
                let mut filled = 0;
                while filled < place.len() {
                    filled += link.receive(&mut place[filled..], None)?.unwrap_or(0);
                }
                Ok(())
            }
        }
    }
}

/// Answers each message, which has a length and a reply length, with that many bytes.
fn echo(at: &LinkAddress) {
    let mut plain = Plain::welcome(at);
    let mut buffer = vec![0; 64 << 20];
    let mut head = [0; 16];
    while plain.fill(&mut head).is_ok() {
        let of = |at: usize| to_usize(u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes")));
        let (out, back) = (of(0), of(8));
        plain.fill(&mut buffer[..out]).expect("as many bytes as were said");
        plain.send(&buffer[..back]);
    }
}

fn lend(at: &LinkAddress) {
    let device = mixfleet_cpu::CpuBackend.open("cpu@1").expect("a second core");
    let server = DeviceServer::bind(at, device, access(at)).expect("an address");
    println!("{}", server.address());
    server.run()
}

/// The least and the middle time of many rounds.
fn timed(mut round: impl FnMut()) -> (f64, f64) {
    (0..ROUNDS / 10).for_each(|_| round());
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let began = Instant::now();
            round();
            began.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[0], times[ROUNDS / 2])
}

/// Round-trip time of messages of `bytes` bytes on a plain connection.
fn ping(plain: &mut Plain, out: u64, back: u64) -> (f64, f64) {
    let mut message: Vec<u8> = [out, back].iter().flat_map(|bytes| bytes.to_le_bytes()).collect();
    message.resize(16 + to_usize(out), 0);
    let mut answer = vec![0; to_usize(back)];
    timed(|| {
        plain.send(&message);
        plain.fill(&mut answer).expect("an answer");
    })
}

/// Time of a layer on a device.
fn layer(device: &dyn Device, out: u64, back: u64) -> Result<(f64, f64)> {
    let alloc = |bytes: u64| device.alloc(bytes, BufferUsage::Activations);
    let (received, mark, attended) = (alloc(out)?, alloc(4)?, alloc(back)?);
    // a quarter each are keys and values where there are half as many KV heads as heads
    let (q, kv) = (out / 2, out / 4);
    let parts: [Slice; 3] = [received.range(0, q), received.range(q, kv), received.range(q + kv, kv)];
    let (data, mut result) = (vec![1; to_usize(q)], vec![0; to_usize(back)]);
    let nothing = [Cmd::new(OpSig::Fill { bytes: 4, word: 1 }, std::slice::from_ref(&mark))?];
    let mut queue = device.queue()?;
    Ok(timed(|| {
        for part in &parts {
            device.write(part, &data[..to_usize(part.bytes)]).expect("a write");
        }
        let ticket = queue.submit_for(&nothing, std::slice::from_ref(&attended)).expect("a batch");
        queue.wait(ticket, TIMEOUT).expect("its end");
        device.read(&attended, &mut result).expect("a read");
    }))
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let at = |at: usize| words.get(at).map(|word| address(word));
    match words.first().map(String::as_str) {
        Some("echo") => {
            echo(&at(1).unwrap_or_else(here));
            return Ok(());
        }
        Some("lend") => lend(&at(1).unwrap_or_else(here)),
        Some("to") => {
            return measure(
                &at(1).expect("the address of the lender"),
                &at(2).expect("the address of the echo process"),
            );
        }
        _ => {}
    }
    measure_beside([here(), here()])?;
    if cfg!(target_os = "linux") { measure_beside(["echo", "lend"].map(file)) } else { Ok(()) }
}

/// Measures between this process and two others at these addresses, the first of which echoes.
fn measure_beside([echo, lend]: [LinkAddress; 2]) -> Result<()> {
    let (mut echoing, echo_at) = other("echo", &echo);
    let (mut lending, lent_at) = other("lend", &lend);
    let measured = measure(&lent_at, &echo_at);
    for (child, at) in [(&mut echoing, echo), (&mut lending, lend)] {
        let _ = child.kill();
        let _ = child.wait();
        if let LinkAddress::Unix(path) = at {
            let _ = std::fs::remove_file(path);
        }
    }
    measured
}

fn measure(lent_at: &LinkAddress, echo_at: &LinkAddress) -> Result<()> {
    let mut plain = Plain::call(echo_at)?;
    let remote = RemoteDevice::open("remote", lent_at.clone(), access(lent_at))?;
    println!("over {}", if matches!(lent_at, LinkAddress::Unix(_)) { "shared memory" } else { "TCP" });
    let local = mixfleet_cpu::CpuBackend.open("cpu@1")?;
    println!(
        "bytes out and back | here | other process | added | ping-pong of as many bytes | added / ping-pong"
    );
    println!("(least and middle of {ROUNDS}, in us)");
    // qwen3-0.6b in bf16: (16 + 2 * 8) * 128 * 2 out, 16 * 128 * 2 back a sequence
    for sequences in [1, 8, 64] {
        let (out, back) = (sequences * 8192, sequences * 4096);
        let here = layer(&*local, out, back)?;
        let there = layer(&remote, out, back)?;
        let ping = ping(&mut plain, out, back);
        let added = (there.0 - here.0, there.1 - here.1);
        println!(
            "{out} {back} | {:.1} {:.1} | {:.1} {:.1} | {:.1} {:.1} | {:.1} {:.1} | {:.2} {:.2}",
            here.0,
            here.1,
            there.0,
            there.1,
            added.0,
            added.1,
            ping.0,
            ping.1,
            added.0 / ping.0,
            added.1 / ping.1
        );
    }
    let (least, middle) = ping(&mut plain, 1, 1);
    println!("round trip of a byte: {least:.1} {middle:.1} us");
    Ok(())
}
