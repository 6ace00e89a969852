//! `mixfleet chat` at a terminal, which util-linux's `script` gives it.

use crate::common::server::Server;
use crate::common::{mixfleet, scratch};
use std::io::{Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Ctrl-C, the upward arrow, and the marks around pasted text, as terminals send them.
const CTRL_C: &str = "\x03";
const UP: &str = "\x1b[A";
const PASTE: [&str; 2] = ["\x1b[200~", "\x1b[201~"];

/// A command at a terminal of its own.
struct AtTerminal {
    child: Child,
    keys: ChildStdin,
    screen: Arc<Mutex<String>>,
    /// Bytes of the screen that an expectation was met by.
    seen: usize,
}

impl AtTerminal {
    fn start(words: &[&str], state: &std::path::Path) -> Self {
        let own = mixfleet();
        let program = own.get_program().to_str().unwrap();
        // a shell that stays would die of Ctrl-C in the program's stead
        let line = [&["exec", program], words].concat().join(" ");
        let mut command = Command::new("script");
        own.get_envs().for_each(|(name, value)| {
            let _ = command.env(name, value.unwrap_or_default());
        });
        command.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
        command
            .env("XDG_STATE_HOME", state)
            .env("TERM", "xterm")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (keys, mut out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let screen = Arc::new(Mutex::new(String::new()));
        let shown = screen.clone();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = out.read(&mut bytes) {
                shown.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        AtTerminal { child, keys, screen, seen: 0 }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
        self.keys.flush().unwrap();
    }

    /// Enters keys at the next prompt: what comes before it is dropped.
    fn enter(&mut self, keys: &str) {
        self.shows("> ");
        self.press(keys);
    }

    /// Waits until the screen shows a text that it has not been asked for yet.
    fn shows(&mut self, text: &str) {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let screen = self.screen.lock().unwrap().clone();
            if let Some(at) = screen[self.seen..].find(text) {
                self.seen += at + text.len();
                return;
            }
            assert!(self.child.try_wait().unwrap().is_none(), "it ended without '{text}': {screen}");
            assert!(Instant::now() < until, "no '{text}' on the screen: {screen}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn ends(mut self) -> (Option<i32>, String) {
        let code = self.child.wait().unwrap().code();
        (code, self.screen.lock().unwrap().clone())
    }
}

#[test]
fn a_chat_is_edited_recalled_pasted_and_stopped() {
    let state = scratch("terminal-chat");
    let words = ["chat", "--device", "cpu", "--max-tokens", "4", "--temperature", "0"];
    let mut chat = AtTerminal::start(&words, &state);
    chat.shows("/bye or Ctrl-D ends");
    chat.enter("/hlep\r");
    chat.shows("there is no /hlep");
    chat.enter("/help\r");
    chat.shows("/system TEXT sets the system prompt");
    chat.enter("/system Be brief.\r");
    chat.shows("Be brief.");
    chat.enter("/system\r");
    chat.shows("system prompt: Be brief.");
    chat.enter("helo\x7flo\r");
    chat.shows("tokens, the first after");
    // the message before, as it was edited
    chat.enter(&format!("{UP}\r"));
    chat.shows("tokens, the first after");
    let [begin, end] = PASTE;
    chat.enter(&format!("{begin}first\nsecond{end}\r"));
    chat.shows("tokens, the first after");
    chat.enter(CTRL_C);
    chat.shows("/bye or Ctrl-D ends");
    chat.enter("/bye\r");
    let (code, screen) = chat.ends();
    assert_eq!(code, Some(0), "{screen}");
    assert_eq!(screen.matches("tokens, the first after").count(), 3, "{screen}");
    let history = std::fs::read_to_string(state.join("mixfleet/chat-history")).unwrap();
    assert!(history.contains("hello\n") && history.contains("first\\nsecond"), "{history}");
}

#[test]
fn ctrl_c_stops_an_answer_and_the_chat_goes_on() {
    let state = scratch("terminal-stop");
    // a simulated device on which a token takes most of a second
    let words = ["chat", "--device", "sim:rtx-4090,compute,dilation:100", "--max-tokens", "1000"];
    let mut chat = AtTerminal::start(&words, &state);
    chat.enter("hello\r");
    chat.shows("hello");
    std::thread::sleep(Duration::from_millis(300));
    chat.press(CTRL_C);
    chat.shows("[stopped, ");
    chat.enter("/bye\r");
    let (code, screen) = chat.ends();
    assert_eq!(code, Some(0), "{screen}");
}

#[test]
fn a_chat_with_a_server_has_the_answers_of_a_chat_here() {
    let server = Server::start(&["--device", "cpu"]);
    let url = format!("http://{}", server.address);
    let said = |words: &[&str]| {
        let mut command = mixfleet();
        command.args(["chat", "--max-tokens", "8", "--temperature", "0"]).args(words);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"hello\n/system Be brief.\nagain\n").unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let there = said(&["--against", &url]);
    assert!(there.lines().count() >= 2, "{there}");
    assert_eq!(there, said(&["--device", "cpu"]));
}
