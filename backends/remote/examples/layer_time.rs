//! Measures what a connection adds to a layer of attention on a device of another process, beside what a
//! round trip and the bandwidth of the same kind of connection allow:
//! `cargo run -p mixfleet-remote --example layer_time`.
//!
//! A layer is: write queries, keys and values, run a command that takes no time worth mentioning, and read
//! what would be attended to. The difference between a device of this process and of another one is the
//! connection's.
//!
//! Both ends may be apart: `layer_time lend HOST:PORT` and `layer_time echo HOST:PORT` there, and
//! `layer_time to HOST:PORT HOST:PORT` here with both addresses. Over a pair of virtual cards with 50 us
//! there and back, as root, where the kernel has netem:
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
use mixfleet_wire::Security;
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
    fn prove(&self, _: &SocketAddr, _: &[u8]) -> Option<Shown> {
        Some(Shown { proof: Vec::new(), is_answered: Box::new(|_| true) })
    }
    fn admit(&self, _: &[u8], _: &SocketAddr, _: &[u8]) -> Option<Vec<u8>> {
        Some(Vec::new())
    }
}

/// Nothing but a measurement is on another network than this host's own.
fn access(address: &SocketAddr) -> DeviceAccess {
    let security = if address.ip().is_loopback() { Security::LoopbackOnly } else { Security::Insecure };
    DeviceAccess { security, secret: Some(Arc::new(Open)) }
}

fn here() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

/// This program again, as `role`, and the address that it serves.
fn other(role: &str) -> (Child, SocketAddr) {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    let mut child = command.arg(role).stdout(Stdio::piped()).spawn().expect("a process");
    let mut line = String::new();
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    out.read_line(&mut line).expect("a line");
    (child, line.trim().parse().expect("an address"))
}

/// Answers each message, of a length and a number of bytes to send back, with so many bytes.
fn echo(at: SocketAddr) {
    let listener = TcpListener::bind(at).expect("a port");
    println!("{}", listener.local_addr().expect("an address"));
    let (mut socket, _) = listener.accept().expect("a caller");
    socket.set_nodelay(true).expect("an option");
    let mut buffer = vec![0; 64 << 20];
    let mut head = [0; 16];
    while socket.read_exact(&mut head).is_ok() {
        let of = |at: usize| to_usize(u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes")));
        let (out, back) = (of(0), of(8));
        socket.read_exact(&mut buffer[..out]).expect("as many bytes as were said");
        socket.write_all(&buffer[..back]).expect("a caller");
    }
}

fn lend(at: SocketAddr) {
    let device = mixfleet_cpu::CpuBackend.open("cpu@1").expect("a second core");
    let server = DeviceServer::bind(at, device, access(&at)).expect("a port");
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

/// Time of messages of so many bytes out and back on a plain connection.
fn ping(socket: &mut TcpStream, out: u64, back: u64) -> (f64, f64) {
    let mut message: Vec<u8> = [out, back].iter().flat_map(|bytes| bytes.to_le_bytes()).collect();
    message.resize(16 + to_usize(out), 0);
    let mut answer = vec![0; to_usize(back)];
    timed(|| {
        socket.write_all(&message).expect("a peer");
        socket.read_exact(&mut answer).expect("an answer");
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
    let address = |at: usize| words.get(at).map(|word| word.parse().expect("HOST:PORT"));
    match words.first().map(String::as_str) {
        Some("echo") => {
            echo(address(1).unwrap_or_else(here));
            return Ok(());
        }
        Some("lend") => lend(address(1).unwrap_or_else(here)),
        Some("to") => return measure(address(1).expect("who lends"), address(2).expect("who echoes")),
        _ => {}
    }
    let (mut echoing, echo_at) = other("echo");
    let (mut lending, lent_at) = other("lend");
    let measured = measure(lent_at, echo_at);
    for child in [&mut echoing, &mut lending] {
        let _ = child.kill();
        let _ = child.wait();
    }
    measured
}

fn measure(lent_at: SocketAddr, echo_at: SocketAddr) -> Result<()> {
    let mut socket = TcpStream::connect(echo_at).expect("a peer");
    socket.set_nodelay(true).expect("an option");
    let remote = RemoteDevice::open("remote", lent_at, access(&lent_at))?;
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
        let ping = ping(&mut socket, out, back);
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
    let (least, middle) = ping(&mut socket, 1, 1);
    println!("round trip of a byte: {least:.1} {middle:.1} us");
    Ok(())
}
