//! CSV traces of Azure, BurstGPT and ServeGen. Columns are found by name, in any order; others are ignored.

use super::read::{Draft, Lengths};
use super::time::utc_nanoseconds;
use mixfleet_hal::units::Seconds;

/// The column names of a header, in lower case.
pub(super) fn columns(header: &str) -> Vec<String> {
    fields(header).map(str::to_ascii_lowercase).collect()
}

/// The fields of a line; none of these formats has a comma inside a field.
fn fields(line: &str) -> impl Iterator<Item = &str> {
    line.split(',').map(|field| field.trim().trim_matches('"'))
}

/// The format of the time column.
#[derive(Clone, Copy)]
pub(super) enum Clock {
    /// Seconds from the trace's start.
    Seconds,
    /// Date and time of day.
    Date,
}

pub(super) struct Table {
    width: usize,
    time: usize,
    prompt: usize,
    output: usize,
    client: Option<usize>,
    clock: Clock,
    /// The first row's date in nanoseconds, which is subtracted: an f64 of a whole date would lose
    /// microseconds.
    origin_ns: Option<i64>,
}

impl Table {
    /// A table under `header`, which contains the columns `names`: time, prompt, output.
    pub(super) fn new(header: &[u8], names: [&str; 3], clock: Clock) -> Result<Self, String> {
        let columns = columns(&String::from_utf8_lossy(header));
        let place = |name: &str| columns.iter().position(|column| column == name);
        let need = |name: &str| place(name).ok_or_else(|| format!("no column {name}"));
        Ok(Table {
            width: columns.len(),
            time: need(names[0])?,
            prompt: need(names[1])?,
            output: need(names[2])?,
            client: place("client").or_else(|| place("model")),
            clock,
            origin_ns: None,
        })
    }

    fn at(&mut self, field: &str) -> Result<Seconds, String> {
        match self.clock {
            Clock::Seconds => {
                let at = field.parse().ok().filter(|at: &f64| at.is_finite() && *at >= 0.0);
                Ok(Seconds(at.ok_or_else(|| format!("'{field}' is not a time in seconds"))?))
            }
            Clock::Date => {
                let now = utc_nanoseconds(field).ok_or_else(|| {
                    format!("'{field}' is not a date and time as in 2023-11-16 18:15:46.6805900")
                })?;
                // The difference of two dates may exceed 64 bits of nanoseconds.
                let origin = i128::from(*self.origin_ns.get_or_insert(now));
                Ok(Seconds((i128::from(now) - origin) as f64 / 1e9))
            }
        }
    }

    /// The request of a line, or the fault.
    pub(super) fn parse(&mut self, line: &[u8]) -> Result<Draft, String> {
        let line = std::str::from_utf8(line).map_err(|_| "it is not text".to_string())?;
        let fields: Vec<&str> = fields(line).collect();
        if fields.len() != self.width {
            return Err(format!("{} fields under {} columns", fields.len(), self.width));
        }
        let count = |place: usize| {
            let field = fields[place];
            field.parse::<u64>().map_err(|_| format!("'{field}' is not a number of tokens"))
        };
        let lengths = Lengths::new(count(self.prompt)?, count(self.output)?)?;
        let class = self.client.map(|client| fields[client].into());
        Ok(Draft { at: self.at(fields[self.time])?, lengths, chain: Vec::new(), class })
    }
}
