//! Looks at the files of a checkpoint in a child process with limits on time and memory, before this process
//! reads them.
//!
//! A template or tokenizer can recurse or allocate without end, which ends the process that uses it. The
//! child is this program with the hidden command `check-files`; it uses each file once, as serving does.

use crate::failure::{Failed, UsageError};
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use mixfleet_hal::printable::printable_lines;
use mixfleet_runtime::model::{
    ChatMessage, ChatTemplate, Error as ModelError, GenerationDefaults, ModelConfig, Tokenizer,
};
use serde_json::{Map, json};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Maximum memory of the child in bytes, besides mapped files. Published tokenizers take less than a fifth.
const MEMORY_BYTES_MAX: u64 = 3 << 30;
/// Stack of the thread that renders.
const STACK_BYTES: usize = 1 << 20;
/// Maximum time of computation in the child.
const CPU_S_MAX: u64 = 60;
/// Maximum time from the start of the child to its end.
const DEADLINE: Duration = Duration::from_secs(120);
/// Maximum number of bytes that the child may write to each of its outputs.
const OUTPUT_BYTES_MAX: u64 = 1 << 20;
/// Poll interval while the child runs.
const POLL: Duration = Duration::from_millis(5);
/// Begins a line in which the child says what it looks at next.
const AT: &str = "at: ";

#[derive(Debug, Args)]
pub(crate) struct CheckFilesArgs {
    path: PathBuf,
    /// Print what 'models --check' prints
    #[arg(long)]
    report: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What the child said before it ended by itself.
struct ChildOutput {
    out: String,
    error: String,
    code: Option<i32>,
}

/// Looks at the checkpoint in `path` in a child, and refuses it if the child does, dies, or exceeds a limit.
pub(crate) fn in_child(path: &Path) -> Result<()> {
    let told = ask(path, &[])?;
    match told.code {
        Some(0) => Ok(()),
        _ => Err(anyhow!(told.error)),
    }
}

/// The text of `models --check`, and whether the checkpoint would be served.
pub(crate) fn report_of(path: &Path, as_json: bool) -> Result<(String, bool)> {
    let words: &[&str] = if as_json { &["--report", "--json"] } else { &["--report"] };
    let told = ask(path, words)?;
    match told.code {
        Some(0) => Ok((told.out, true)),
        Some(1) if !told.out.is_empty() => Ok((told.out, false)),
        _ => Err(anyhow!(told.error)),
    }
}

/// The child's side; `report` prints the checkpoint's support, as JSON or not.
pub(crate) fn run(args: &CheckFilesArgs, report: &dyn Fn(&Path, bool) -> Result<()>) -> Result<()> {
    limit()?;
    if args.report {
        return report(&args.path, args.json);
    }
    let path = &args.path;
    begin(path, "config.json");
    let config = ModelConfig::open(path).map(drop);
    begin(path, "generation_config.json");
    let defaults = GenerationDefaults::open(path).map(drop);
    begin(path, "tokenizer.json");
    let tokenizer = Tokenizer::open(path).map(drop);
    try_template(path)?;
    // The later load of these files reports the fault in its own terms.
    let _ = (config, defaults, tokenizer);
    Ok(())
}

/// Tells the parent which file is used next.
#[allow(clippy::print_stderr, reason = "the parent reads it")]
pub(crate) fn begin(path: &Path, file: &str) {
    let file = if path.is_file() { path.to_owned() } else { path.join(file) };
    eprintln!("{AT}{}", file.display());
}

/// Renders the template of a checkpoint for a few chats.
///
/// # Errors
/// When a rendering exceeds its limits on texts and lists.
pub(crate) fn try_template(path: &Path) -> Result<()> {
    let file = "chat_template.jinja";
    begin(path, if path.join(file).exists() { file } else { "tokenizer_config.json" });
    // Threads that serve have 2 MiB; what overflows half of that is refused.
    let path = path.to_owned();
    let tried = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(move || render_some(&path));
    match tried.map(std::thread::JoinHandle::join) {
        Ok(Ok(Some(error))) => Err(Failed(error.to_string()).into()),
        _ => Ok(()),
    }
}

/// The first error about the limits of a rendering; templates may reject chats otherwise.
fn render_some(path: &Path) -> Option<ModelError> {
    let template = ChatTemplate::open(path).ok()??;
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let function = json!({"name": "weather", "description": "Tells the weather.", "parameters": parameters});
    let tools = Map::from_iter([("tools".to_owned(), json!([{"type": "function", "function": function}]))]);
    let message = |role: &&str| ChatMessage::new(*role, "<|a|> </think> b, 1 + 1?");
    for roles in [&["user"][..], &["system", "user", "assistant", "user"], &["user", "assistant", "tool"]] {
        let messages: Vec<ChatMessage> = roles.iter().map(message).collect();
        for arguments in [&Map::new(), &tools] {
            for add_generation_prompt in [true, false] {
                let rendered = template.render(&messages, add_generation_prompt, arguments, 0);
                if let Some(error) = rendered.err().filter(ModelError::is_template_limit) {
                    return Some(error);
                }
            }
        }
    }
    None
}

#[cfg(unix)]
fn limit() -> Result<()> {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let to = |value| Rlimit { current: Some(value), maximum: Some(value) };
    setrlimit(Resource::Data, to(MEMORY_BYTES_MAX)).context("cannot limit memory")?;
    setrlimit(Resource::Cpu, to(CPU_S_MAX)).context("cannot limit time")?;
    // A faulty file is no reason for a core dump.
    setrlimit(Resource::Core, to(0)).context("cannot limit core dumps")
}

#[cfg(not(unix))]
fn limit() -> Result<()> {
    Ok(())
}

fn ask(path: &Path, words: &[&str]) -> Result<ChildOutput> {
    let program = std::env::current_exe().context("cannot find this program, to check files in a child")?;
    let mut command = Command::new(program);
    command.arg("check-files").args(words).arg("--").arg(path);
    // One thread keeps the memory of each allocation arena small; Mesa says nothing of a directory that is
    // set.
    command.env("RAYON_NUM_THREADS", "1").env("MALLOC_ARENA_MAX", "2").env("XDG_RUNTIME_DIR", "/nonexistent");
    command.env_remove("MIXFLEET_BACKENDS");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot start a child that checks files")?;
    let (out, error) = (reader(child.stdout.take()), reader(child.stderr.take()));
    let ended = wait(&mut child)?;
    let out = out.join().unwrap_or_default();
    let error = error.join().unwrap_or_default();
    let at = error.lines().rfind(|line| line.starts_with(AT)).map(|line| &line[AT.len()..]);
    let at = printable_lines(at.unwrap_or("its files")).into_owned();
    let Some(ended) = ended else {
        bail!(Failed(format!("{at}: using it took more than {} s", DEADLINE.as_secs())));
    };
    let said: Vec<&str> = error.lines().filter(|line| !line.starts_with(AT)).collect();
    if let Some(why) = death(ended, &said) {
        bail!(Failed(format!("{at}: {why}")));
    }
    let error = said.join("\n");
    let error = error.strip_prefix("mixfleet: ").unwrap_or(&error).to_owned();
    if ended.code() == Some(2) {
        bail!(UsageError(error));
    }
    Ok(ChildOutput { out, error, code: ended.code() })
}

/// Reads an output of the child to its end, and keeps its beginning.
fn reader(output: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        if let Some(mut output) = output {
            let _ = output.by_ref().take(OUTPUT_BYTES_MAX).read_to_end(&mut kept);
            let _ = std::io::copy(&mut output, &mut std::io::sink());
        }
        String::from_utf8_lossy(&kept).into_owned()
    })
}

/// Waits for the child; none if it was killed at the deadline.
fn wait(child: &mut Child) -> Result<Option<ExitStatus>> {
    let began = Instant::now();
    loop {
        if let Some(ended) = child.try_wait().context("cannot wait for a child")? {
            return Ok(Some(ended));
        }
        if began.elapsed() > DEADLINE {
            child.kill().and_then(|()| child.wait()).context("cannot end a child")?;
            return Ok(None);
        }
        std::thread::sleep(POLL);
    }
}

/// Why the child did not end by itself, if so.
fn death(ended: ExitStatus, said: &[&str]) -> Option<String> {
    #[cfg(unix)]
    let signal = std::os::unix::process::ExitStatusExt::signal(&ended);
    #[cfg(not(unix))]
    let signal = ended.code().is_none().then_some(0);
    let signal = signal?;
    let gib = MEMORY_BYTES_MAX >> 30;
    Some(match signal {
        _ if said.iter().any(|line| line.contains("overflowed its stack")) => {
            "it recurses without end: using it overflows the stack".to_owned()
        }
        _ if said.iter().any(|line| line.contains("memory allocation of")) => {
            format!("using it takes more than {gib} GiB of memory")
        }
        // SIGXCPU, and SIGKILL at the hard limit
        24 | 9 => format!("using it took more than {CPU_S_MAX} s of computation"),
        _ => format!("using it ended its process by signal {signal}, within {gib} GiB and {CPU_S_MAX} s"),
    })
}
