//! A trace file as a stream of requests in order of time.

use super::agentic::Agentic;
use super::lines::Lines;
use super::table::{Clock, Table};
use super::{Format, Progress, Request, TOKENS_MAX, TraceError, UNIX_S_MIN, mooncake, request_log};
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

/// Parses a line of one request, or returns the fault.
type ParseLine = Box<dyn FnMut(&[u8]) -> Result<Draft, String> + Send>;

/// Puts the requests of a file's lines in order of time.
pub(super) trait Sorter: Send {
    /// Whether the next request depends on a line to come.
    fn wants_line(&self) -> bool;

    /// Takes in a line, or returns the fault.
    fn read(&mut self, line: &[u8], repairs: &mut Repairs) -> Result<(), String>;

    /// The next request, which gets this id; none if all that were read are gone.
    fn next(&mut self, id: u64, repairs: &mut Repairs) -> Result<Option<Request>, TraceError>;
}

/// The requests of a file in order of time, with ids counted from 0. It keeps a window of lines, or the
/// overlapping sessions, in memory, never the whole file. After an error nothing follows.
pub struct Trace {
    lines: Lines,
    format: Format,
    block_tokens: Option<u32>,
    sorter: Box<dyn Sorter>,
    repairs: Repairs,
    next_id: u64,
    /// The end of the file, or the error that follows the requests read before it.
    end: Option<Option<TraceError>>,
    ended: bool,
}

impl Trace {
    /// Opens the file at `path`. Format and compression are detected from its content.
    pub fn open(path: &Path, options: ReadOptions) -> Result<Self, TraceError> {
        let name = path.display().to_string();
        let error = |cause| TraceError::Read { name: name.clone(), line: 0, cause };
        let file = mixfleet_hal::files::open(path).map_err(error)?;
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
        let sorter = sorter(format, first, options).map_err(|cause| lines.error(format, cause));
        let (block_tokens, sorter) = sorter?;
        if matches!(format, Format::Azure | Format::BurstGpt | Format::ServeGen) {
            // Their first line is a header.
            lines.next()?;
        }
        let repairs = Repairs::default();
        Ok(Trace { lines, format, block_tokens, sorter, repairs, next_id: 0, end: None, ended: false })
    }

    /// The detected format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Tokens per block of the chains; none if the format has no information about prefixes.
    pub fn block_tokens(&self) -> Option<u32> {
        self.block_tokens
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
        while self.end.is_none() && self.sorter.wants_line() {
            self.end = match self.lines.next() {
                Ok(Some(line)) => {
                    let read = self.sorter.read(line, &mut self.repairs);
                    read.err().map(|cause| Some(self.lines.error(self.format, cause)))
                }
                Ok(None) => Some(None),
                Err(error) => Some(Some(error)),
            };
        }
        let Some(request) = self.sorter.next(self.next_id, &mut self.repairs)? else {
            return match self.end.take().flatten() {
                Some(error) => Err(error),
                None if self.next_id == 0 => Err(TraceError::Empty { name: self.lines.name().into() }),
                None => Ok(None),
            };
        };
        self.next_id += 1;
        Ok(Some(request))
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

/// What sorts a file of `format` that begins with the line `first`, and the tokens per block of its chains.
fn sorter(
    format: Format,
    first: &[u8],
    options: ReadOptions,
) -> Result<(Option<u32>, Box<dyn Sorter>), String> {
    let (block_tokens, parse, has_own_clock): (_, ParseLine, _) = match format {
        Format::Mooncake => {
            mooncake::check_first(first)?;
            let block_tokens = options.block_tokens.unwrap_or(mooncake::BLOCK_TOKENS).max(1);
            (Some(block_tokens), Box::new(move |line: &[u8]| mooncake::parse(line, block_tokens, 1e3)), false)
        }
        Format::Bailian => {
            let block_tokens = options.block_tokens.unwrap_or(mooncake::BAILIAN_BLOCK_TOKENS).max(1);
            (Some(block_tokens), Box::new(move |line: &[u8]| mooncake::parse(line, block_tokens, 1.0)), false)
        }
        Format::Azure => {
            let names = ["timestamp", "contexttokens", "generatedtokens"];
            let mut table = Table::new(first, names, Clock::Date)?;
            (None, Box::new(move |line: &[u8]| table.parse(line)), true)
        }
        Format::BurstGpt => {
            let names = ["timestamp", "request tokens", "response tokens"];
            let mut table = Table::new(first, names, Clock::Seconds)?;
            (None, Box::new(move |line: &[u8]| table.parse(line)), false)
        }
        Format::ServeGen => {
            let mut table = Table::new(first, ["t_s", "input_tokens", "output_tokens"], Clock::Seconds)?;
            (None, Box::new(move |line: &[u8]| table.parse(line)), false)
        }
        Format::RequestLog => (None, Box::new(request_log::parse), true),
        Format::Agentic => {
            let agentic = Agentic::new(first, options.session_every)?;
            return Ok((Some(agentic.block_tokens), Box::new(agentic)));
        }
    };
    Ok((block_tokens, Box::new(Window::new(parse, has_own_clock))))
}

/// Sorts the requests of about a thousand lines.
struct Window {
    parse: ParseLine,
    /// Requests by time, and in the file's order among equal times.
    waiting: BTreeMap<(Ordered, u64), Draft>,
    /// Number of lines read, which keeps equal times in the file's order.
    count: u64,
    latest: Seconds,
    /// The trace's start on the file's clock; the first request's time where they differ.
    origin: Option<Seconds>,
    emitted: Option<Seconds>,
}

impl Window {
    fn new(parse: ParseLine, has_own_clock: bool) -> Self {
        Window {
            parse,
            waiting: BTreeMap::new(),
            count: 0,
            latest: Seconds(f64::NEG_INFINITY),
            origin: (!has_own_clock).then_some(Seconds::ZERO),
            emitted: None,
        }
    }
}

impl Sorter for Window {
    fn wants_line(&self) -> bool {
        self.waiting.len() < WINDOW_LINES
    }

    fn read(&mut self, line: &[u8], repairs: &mut Repairs) -> Result<(), String> {
        let draft = (self.parse)(line)?;
        if !draft.at.0.is_finite() {
            return Err(format!("{} is not a time", draft.at.0));
        }
        if self.emitted.is_some_and(|emitted| draft.at < emitted) {
            return Err(format!(
                "it arrives before a request more than {WINDOW_LINES} lines above; sort the file"
            ));
        }
        repairs.reordered += u64::from(draft.at < self.latest);
        self.latest = self.latest.max(draft.at);
        self.waiting.insert((Ordered(draft.at.0), self.count), draft);
        self.count += 1;
        Ok(())
    }

    fn next(&mut self, id: u64, repairs: &mut Repairs) -> Result<Option<Request>, TraceError> {
        let Some((_, draft)) = self.waiting.pop_first() else { return Ok(None) };
        if self.emitted.is_none() && draft.at.0 >= UNIX_S_MIN {
            self.origin = Some(draft.at);
        }
        self.emitted = Some(draft.at);
        let at = draft.at - *self.origin.get_or_insert(draft.at);
        TraceError::unless_late("a request arrives", at.0)?;
        Ok(Some(Request {
            id,
            at,
            prompt_tokens: draft.lengths.prompt,
            output_tokens: draft.lengths.repaired_output(repairs),
            chain: draft.chain,
            session: None,
            class: draft.class,
        }))
    }
}
