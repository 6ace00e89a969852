//! A trace file as a stream of requests in order of time.

use super::agentic::Agentic;
use super::lines::Lines;
use super::mooncake::{self, Mooncake};
use super::request_log::RequestLog;
use super::table::{Clock, Table};
use super::{Format, Progress, Request, TOKENS_MAX, TraceError};
use mixfleet_hal::units::{Ordered, Seconds};
use mixfleet_scheduler::kv::BlockHash;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// Lines over which requests are sorted by time. Logs that are written as answers end are slightly out of
/// order; more than this is another kind of file, or a broken one.
const WINDOW_LINES: usize = 1024;

/// Options for what files do not contain.
#[derive(Clone, Copy, Debug)]
pub struct ReadOptions {
    /// Tokens per Mooncake `hash_ids` entry; other formats state them, or have none.
    pub block_tokens: Option<u32>,
    /// Interval between the starts of agentic sessions, which have no common clock.
    pub session_every: Seconds,
}

impl Default for ReadOptions {
    fn default() -> Self {
        ReadOptions { block_tokens: None, session_every: Seconds(60.0) }
    }
}

/// Counts of repairs, so that nothing is changed silently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Repairs {
    /// Requests that arrived before an earlier line's, and were sorted.
    pub reordered: u64,
    /// Answers of no token, which count as one, since a request has at least a first token.
    pub empty_outputs: u64,
    /// Agentic requests whose think time is not in the file, and is taken from the gap between arrivals.
    pub unknown_thinks: u64,
}

/// Plausible lengths of a prompt and an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lengths {
    pub(super) prompt: u32,
    /// Tokens of the answer; 0 is repaired later, where repairs are counted.
    pub(super) output: u32,
}

impl Lengths {
    pub(super) fn new(prompt: u64, output: u64) -> Result<Self, String> {
        if prompt == 0 {
            return Err("a prompt of no token".into());
        }
        let bounded = |what: &str, tokens: u64| {
            let fits = u32::try_from(tokens).ok().filter(|&tokens| tokens <= TOKENS_MAX);
            fits.ok_or_else(|| format!("{what} of {tokens} tokens is beyond {TOKENS_MAX}"))
        };
        Ok(Lengths { prompt: bounded("a prompt", prompt)?, output: bounded("an answer", output)? })
    }

    /// The answer's length, at least 1.
    pub(super) fn repaired_output(self, repairs: &mut Repairs) -> u32 {
        repairs.empty_outputs += u64::from(self.output == 0);
        self.output.max(1)
    }
}

/// The request on one line.
pub(super) struct Draft {
    /// Arrival time on the file's clock.
    pub(super) at: Seconds,
    pub(super) lengths: Lengths,
    pub(super) chain: Vec<BlockHash>,
    pub(super) class: Option<Arc<str>>,
}

/// Parses lines of one request each.
pub(super) trait LineParser: Send {
    /// The request of `line`, or what is wrong with it.
    fn parse(&mut self, line: &[u8]) -> Result<Draft, String>;
}

/// The requests of a file in order of time, with ids counted from 0. It keeps a window of lines, or the
/// overlapping sessions, in memory, never the whole file. After an error nothing follows.
pub struct Trace {
    lines: Lines,
    format: Format,
    source: Source,
    repairs: Repairs,
    next_id: u64,
    ended: bool,
}

enum Source {
    Window(Window),
    Agentic(Agentic),
}

impl Trace {
    /// Opens the file at `path`. Format and compression are detected from its content.
    pub fn open(path: &Path, options: ReadOptions) -> Result<Self, TraceError> {
        let name = path.display().to_string();
        let error = |cause| TraceError::Read { name: name.clone(), line: 0, cause };
        let file = std::fs::File::open(path).map_err(error)?;
        let metadata = file.metadata().map_err(error)?;
        let total = metadata.is_file().then_some(metadata.len());
        Trace::with_total(name, file, total, options)
    }

    /// Reads from `raw`, which error messages call `name`.
    pub fn from_reader(
        name: impl Into<String>,
        raw: impl Read + Send + 'static,
        options: ReadOptions,
    ) -> Result<Self, TraceError> {
        Trace::with_total(name.into(), raw, None, options)
    }

    fn with_total(
        name: String,
        raw: impl Read + Send + 'static,
        total: Option<u64>,
        options: ReadOptions,
    ) -> Result<Self, TraceError> {
        let mut lines = Lines::new(name, raw, total)?;
        let Some(first) = lines.peek()? else {
            return Err(TraceError::Empty { name: lines.name().into() });
        };
        let format = match Format::detect(first) {
            Ok(format) => format,
            Err(cause) => return Err(TraceError::UnknownFormat { name: lines.name().into(), cause }),
        };
        let source = Source::new(format, &mut lines, options)?;
        Ok(Trace { lines, format, source, repairs: Repairs::default(), next_id: 0, ended: false })
    }

    /// The detected format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Tokens per block of the chains; none if the format has no information about prefixes.
    pub fn block_tokens(&self) -> Option<u32> {
        match &self.source {
            Source::Window(window) => window.block_tokens,
            Source::Agentic(agentic) => Some(agentic.block_tokens()),
        }
    }

    /// The repairs so far.
    pub fn repairs(&self) -> Repairs {
        self.repairs
    }

    /// The progress of reading the file.
    pub fn progress(&self) -> Progress {
        self.lines.progress()
    }

    fn advance(&mut self) -> Result<Option<Request>, TraceError> {
        let (lines, repairs) = (&mut self.lines, &mut self.repairs);
        let next = match &mut self.source {
            Source::Window(window) => window.next(lines, repairs, self.next_id)?,
            Source::Agentic(agentic) => agentic.next(lines, repairs, self.next_id)?,
        };
        if next.is_none() && self.next_id == 0 {
            return Err(TraceError::Empty { name: lines.name().into() });
        }
        self.next_id += u64::from(next.is_some());
        Ok(next)
    }
}

impl Iterator for Trace {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.advance().transpose();
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

impl Source {
    fn new(format: Format, lines: &mut Lines, options: ReadOptions) -> Result<Self, TraceError> {
        let table = |lines: &mut Lines, names, clock| {
            let header = lines.next()?.unwrap_or_default().to_vec();
            Table::new(&header, names, clock).map_err(|cause| lines.error(format, cause))
        };
        Ok(match format {
            Format::Mooncake => {
                let block_tokens = options.block_tokens.unwrap_or(mooncake::BLOCK_TOKENS).max(1);
                Source::Window(Window::new(format, Mooncake { block_tokens }, Some(block_tokens), false))
            }
            Format::Azure => {
                let table = table(lines, ["timestamp", "contexttokens", "generatedtokens"], Clock::Date)?;
                Source::Window(Window::new(format, table, None, true))
            }
            Format::ServeGen => {
                let table = table(lines, ["t_s", "input_tokens", "output_tokens"], Clock::Seconds)?;
                Source::Window(Window::new(format, table, None, false))
            }
            Format::RequestLog => Source::Window(Window::new(format, RequestLog, None, true)),
            Format::Agentic => Source::Agentic(Agentic::new(lines, options.session_every)?),
        })
    }
}

/// Sorts the requests of about a thousand lines.
struct Window {
    format: Format,
    parser: Box<dyn LineParser>,
    block_tokens: Option<u32>,
    /// Requests by time, and in the file's order among equal times.
    waiting: BTreeMap<(Ordered, u64), Draft>,
    /// Number of lines read, which keeps equal times in the file's order.
    count: u64,
    latest: Seconds,
    /// Whether the file's clock differs from the trace's.
    foreign_clock: bool,
    origin: Option<Seconds>,
    emitted: Option<Seconds>,
    /// The end of the file, or the error that follows the waiting requests.
    end: Option<Option<TraceError>>,
}

impl Window {
    fn new(
        format: Format,
        parser: impl LineParser + 'static,
        block_tokens: Option<u32>,
        foreign_clock: bool,
    ) -> Self {
        Window {
            format,
            parser: Box::new(parser),
            block_tokens,
            waiting: BTreeMap::new(),
            count: 0,
            latest: Seconds(f64::NEG_INFINITY),
            foreign_clock,
            origin: None,
            emitted: None,
            end: None,
        }
    }

    fn next(
        &mut self,
        lines: &mut Lines,
        repairs: &mut Repairs,
        id: u64,
    ) -> Result<Option<Request>, TraceError> {
        while self.end.is_none() && self.waiting.len() < WINDOW_LINES {
            match self.read(lines, repairs) {
                Ok(true) => {}
                Ok(false) => self.end = Some(None),
                Err(error) => self.end = Some(Some(error)),
            }
        }
        let Some((_, draft)) = self.waiting.pop_first() else {
            return self.end.take().flatten().map_or(Ok(None), Err);
        };
        self.emitted = Some(draft.at);
        let origin = *self.origin.get_or_insert(if self.foreign_clock { draft.at } else { Seconds::ZERO });
        TraceError::unless_late("a request arrives", (draft.at - origin).0)?;
        Ok(Some(Request {
            id,
            at: draft.at - origin,
            prompt_tokens: draft.lengths.prompt,
            output_tokens: draft.lengths.repaired_output(repairs),
            chain: draft.chain,
            session: None,
            class: draft.class,
        }))
    }

    /// Reads one line; false at the end of the file.
    fn read(&mut self, lines: &mut Lines, repairs: &mut Repairs) -> Result<bool, TraceError> {
        let Some(line) = lines.next()? else { return Ok(false) };
        let draft = self.parser.parse(line).map_err(|cause| lines.error(self.format, cause))?;
        if !draft.at.0.is_finite() {
            return Err(lines.error(self.format, format!("{} is not a time", draft.at.0)));
        }
        if self.emitted.is_some_and(|emitted| draft.at < emitted) {
            let cause =
                format!("it arrives before a request more than {WINDOW_LINES} lines above; sort the file");
            return Err(lines.error(self.format, cause));
        }
        repairs.reordered += u64::from(draft.at < self.latest);
        self.latest = self.latest.max(draft.at);
        self.waiting.insert((Ordered(draft.at.0), self.count), draft);
        self.count += 1;
        Ok(true)
    }
}
