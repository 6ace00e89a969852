//! Two connected processes, and what happens when one of them ends or stops midway.

use crate::conformance::{LONG, content, noise, piece, read, region, write};
use mixfleet_hal::ErrorKind;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, RemoteAccess, Transport};
use mixfleet_wire::{HostRegion, Shm, Tcp, TcpConfig};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

const BYTES: u64 = 8 << 20;
/// What the other process is for, and where it finds this one.
const ROLE: &str = "MIXFLEET_WIRE_TEST_ROLE";
const DESCRIPTOR: &str = "MIXFLEET_WIRE_TEST_DESCRIPTOR";
/// Marks the start of a line for this process within the test harness's output.
const MARK: &str = "::";

fn transport(name: &str) -> Box<dyn Transport> {
    match name {
        "shm" => Box::new(Shm::new().unwrap()),
        "tcp" => Box::new(Tcp::new(TcpConfig::loopback()).unwrap()),
        other => panic!("no transport '{other}'"),
    }
}

fn say(text: &str) {
    let mut out = std::io::stdout();
    // the harness writes to the same line
    writeln!(out, "\n{MARK}{text}").and_then(|()| out.flush()).unwrap();
}

/// This binary started as another process, which `be_the_other_process` runs. It ends with this process,
/// because its stdin closes.
struct Other {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Other {
    fn start(role: &str, descriptor: Option<&Descriptor>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["processes::tcp::bytes_cross", "--exact", "--nocapture"]).env(ROLE, role);
        if let Some(descriptor) = descriptor {
            command.env(DESCRIPTOR, serde_json::to_string(descriptor).unwrap());
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Other { child, lines }
    }

    /// Its next line.
    fn hear(&mut self) -> String {
        let said =
            self.lines.by_ref().map(Result::unwrap).find_map(|l| Some(l.strip_prefix(MARK)?.to_owned()));
        said.expect("the other process said nothing more")
    }

    fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Stops it, and returns when it stands still.
    fn stop(&self) {
        self.signal("-STOP");
        let path = format!("/proc/{}/task", self.child.id());
        let stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            stat.rsplit(')').next().unwrap().trim_start().starts_with('T')
        };
        while !std::fs::read_dir(&path).unwrap().all(stopped) {
            std::thread::yield_now();
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether this process is one that `Other` started; then its part is played.
fn be_the_other_process() -> bool {
    let Ok(role) = std::env::var(ROLE) else { return false };
    let (verb, name) = role.split_once(' ').unwrap();
    let transport = transport(name);
    if verb == "own" {
        let memory = region(&noise(BYTES as usize, 1));
        let descriptor = transport.register(memory, RemoteAccess::ReadWrite).unwrap();
        say(&serde_json::to_string(&descriptor).unwrap());
        let _ = std::io::stdin().read_line(&mut String::new());
        return true;
    }
    let descriptor: Descriptor = serde_json::from_str(&std::env::var(DESCRIPTOR).unwrap()).unwrap();
    let mut way = transport.connect(region(&[7; BYTES as usize]), &descriptor).unwrap();
    for round in 0u64.. {
        match write(&mut *way, &[piece(0, 0, BYTES)]) {
            Ok(()) if round == 0 => say("wrote"),
            Ok(()) => {}
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::Closed, "{error}");
                say("closed");
                break;
            }
        }
    }
    true
}

fn bytes_cross(name: &str) {
    let mut owner = Other::start(&format!("own {name}"), None);
    let descriptor: Descriptor = serde_json::from_str(&owner.hear()).unwrap();
    let (user, here) = (transport(name), region(&vec![0; BYTES as usize]));
    let mut way = user.connect(here.clone(), &descriptor).unwrap();
    read(&mut *way, &[piece(0, 0, BYTES)]).unwrap();
    assert!(content(&here) == noise(BYTES as usize, 1), "as the owner filled it");
    let sent = noise(BYTES as usize, 2);
    here.store(0, &sent).unwrap();
    let pieces: Vec<_> = (0..8).map(|i| piece(i << 20, (7 - i) << 20, 1 << 20)).collect();
    write(&mut *way, &pieces).unwrap();
    let back = region(&vec![0; BYTES as usize]);
    read(&mut *user.connect(back.clone(), &descriptor).unwrap(), &pieces).unwrap();
    assert!(content(&back) == sent);
}

fn a_killed_owner_is_closed(name: &str) {
    let mut owner = Other::start(&format!("own {name}"), None);
    let descriptor: Descriptor = serde_json::from_str(&owner.hear()).unwrap();
    let (user, here) = (transport(name), region(&vec![0; BYTES as usize]));
    let mut way = user.connect(here.clone(), &descriptor).unwrap();
    write(&mut *way, &[piece(0, 0, BYTES)]).unwrap();
    // more than socket buffers hold, so that it is in flight when the owner ends
    let pieces = [piece(0, 0, BYTES); 16];
    owner.stop();
    let begun = if name == "shm" { None } else { Some(way.write(&pieces).unwrap()) };
    owner.child.kill().unwrap();
    owner.child.wait().unwrap();
    if let Some(transfer) = begun {
        assert_eq!(way.wait(transfer, LONG).unwrap_err().kind, ErrorKind::Closed);
    }
    assert_eq!(write(&mut *way, &pieces).unwrap_err().kind, ErrorKind::Closed);
    assert_eq!(user.connect(here, &descriptor).err().unwrap().kind, ErrorKind::Closed);
}

fn owned(name: &str) -> (Box<dyn Transport>, Arc<HostRegion>, Descriptor, Other) {
    let (owner, there) = (transport(name), region(&vec![0; BYTES as usize]));
    let descriptor = owner.register(there.clone(), RemoteAccess::Write).unwrap();
    let mut writer = Other::start(&format!("write {name}"), Some(&descriptor));
    assert_eq!(writer.hear(), "wrote");
    (owner, there, descriptor, writer)
}

fn all_are(memory: &HostRegion, byte: u8) -> bool {
    content(memory).iter().all(|&b| b == byte)
}

fn a_killed_writer_is_over(name: &str) {
    let (owner, there, descriptor, mut writer) = owned(name);
    writer.child.kill().unwrap();
    owner.deregister(&descriptor).unwrap();
    there.store(0, &[9; BYTES as usize]).unwrap();
    writer.child.wait().unwrap();
    assert!(all_are(&there, 9));
}

/// Stops a writer, takes the memory back, uses it, and lets the writer go on. Returns whether the memory got
/// fresh pages.
fn a_stopped_writer_is_fenced(name: &str) -> bool {
    let (owner, there, descriptor, mut writer) = owned(name);
    let file = format!("/proc/self/fd/{}", there.mapping().unwrap().fd.unwrap());
    let before = std::fs::metadata(&file).unwrap().ino();
    writer.stop();
    owner.deregister(&descriptor).unwrap();
    there.store(0, &[9; BYTES as usize]).unwrap();
    writer.signal("-CONT");
    assert_eq!(writer.hear(), "closed");
    assert!(all_are(&there, 9), "a late write landed");
    // and the memory is as good as before
    let again = owner.register(there.clone(), RemoteAccess::Write).unwrap();
    let mut way = transport(name).connect(region(&[3; 4]), &again).unwrap();
    write(&mut *way, &[piece(0, 0, 4)]).unwrap();
    let mut start = [0; 5];
    there.load(0, &mut start).unwrap();
    assert_eq!(start, [3, 3, 3, 3, 9]);
    std::fs::metadata(&file).unwrap().ino() != before
}

mod shm {
    #[test]
    fn bytes_cross() {
        super::bytes_cross("shm");
    }

    #[test]
    fn a_killed_owner_is_closed() {
        super::a_killed_owner_is_closed("shm");
    }

    #[test]
    fn a_killed_writer_is_over() {
        super::a_killed_writer_is_over("shm");
    }

    #[test]
    fn a_writer_stopped_in_the_middle_of_a_copy_goes_on_into_pages_that_nobody_reads() {
        // It copies nearly all the time: to stop it outside a copy thirty times in a row does not happen.
        assert!((0..30).any(|_| super::a_stopped_writer_is_fenced("shm")));
    }
}

mod tcp {
    #[test]
    fn bytes_cross() {
        if !super::be_the_other_process() {
            super::bytes_cross("tcp");
        }
    }

    #[test]
    fn a_killed_owner_is_closed() {
        super::a_killed_owner_is_closed("tcp");
    }

    #[test]
    fn a_killed_writer_is_over() {
        super::a_killed_writer_is_over("tcp");
    }

    #[test]
    fn a_stopped_writer_is_fenced() {
        assert!(!super::a_stopped_writer_is_fenced("tcp"), "no other process has mapped its pages");
    }
}
