//! `mixfleet serve` as a child process.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};

/// A running server on a port of its own.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) log: Option<BufReader<ChildStderr>>,
    pub(crate) address: String,
    /// What it logged and was read.
    pub(crate) seen: String,
}

impl Server {
    /// With the built-in model; returns once it is ready.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Server::with(&[&["--kv-memory", "0.02"], arguments].concat())
    }

    /// With nothing but these arguments.
    pub(crate) fn with(arguments: &[&str]) -> Self {
        let mut command = super::mixfleet();
        command.args(["serve", "--listen", "127.0.0.1:0"]).args(arguments);
        Server::spawned(command.stderr(Stdio::piped()).spawn().unwrap())
    }

    /// The same, after a line of shell.
    pub(crate) fn under(line: &str, arguments: &[&str]) -> Self {
        let own = super::mixfleet();
        let mut shell = Command::new("sh");
        own.get_envs().for_each(|(name, value)| {
            match value {
                Some(value) => shell.env(name, value),
                None => shell.env_remove(name),
            };
        });
        shell.args(["-c", &format!("{line}; exec \"$0\" \"$@\"")]).arg(own.get_program());
        shell.args(["serve", "--listen", "127.0.0.1:0"]).args(arguments);
        Server::spawned(shell.stderr(Stdio::piped()).spawn().unwrap())
    }

    /// With a process whose standard error is piped; returns once it is ready.
    pub(crate) fn spawned(child: Child) -> Self {
        Server::spawned_until(child, "ready: http://", "/v1")
    }

    /// With these arguments; returns once it listens.
    pub(crate) fn loading(arguments: &[&str]) -> Self {
        let mut command = super::mixfleet();
        command.args(["serve", "--listen", "127.0.0.1:0"]).args(arguments);
        let child = command.stderr(Stdio::piped()).spawn().unwrap();
        Server::spawned_until(child, "listening; no external engine has answered yet address=", "")
    }

    /// Returns once it logs its address between these words.
    fn spawned_until(child: Child, before: &str, after: &str) -> Self {
        let mut server = Server { child, log: None, address: String::new(), seen: String::new() };
        server.log = server.child.stderr.take().map(BufReader::new);
        while server.address.is_empty() {
            let line = server.log_line();
            assert!(!line.is_empty(), "the server ended: {}", server.seen);
            if let Some((_, address)) = line.split_once(before) {
                server.address = address.trim().trim_end_matches(after).to_string();
            }
        }
        server
    }

    /// The next line of its log; empty at the end.
    pub(crate) fn log_line(&mut self) -> String {
        let mut line = String::new();
        self.log.as_mut().expect("piped").read_line(&mut line).unwrap();
        self.seen.push_str(&line);
        line
    }

    /// Reads its log until it says `words`; at once where it has.
    pub(crate) fn wait_for(&mut self, words: &str) {
        while !self.seen.contains(words) {
            assert!(!self.log_line().is_empty(), "it ended without '{words}': {}", self.seen);
        }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).unwrap()
    }

    /// Sends a request and reads until the server closes: status and body.
    pub(crate) fn call(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        let (head, body) = self.exchange(method, path, headers, body);
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body)
    }

    /// Sends a request and reads until the server closes: head and body.
    pub(crate) fn exchange(&self, method: &str, path: &str, headers: &str, body: &str) -> (String, String) {
        let mut stream = self.connect();
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}");
        write!(stream, "{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}")
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").expect("a response");
        (head.to_string(), body.to_string())
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = self.call("POST", path, "", &body.to_string());
        (status, serde_json::from_str(&body).unwrap())
    }

    pub(crate) fn signal(&self) {
        let status =
            std::process::Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        assert!(status.unwrap().success());
    }

    pub(crate) fn wait(mut self) -> (ExitStatus, String) {
        let status = self.child.wait().unwrap();
        let mut rest = String::new();
        self.log.as_mut().expect("piped").read_to_string(&mut rest).unwrap();
        (status, rest)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
