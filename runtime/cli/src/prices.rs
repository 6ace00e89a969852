//! Reads dated offers from a CSV file.

use anyhow::{Context, Result, anyhow};
use csv::StringRecord;
use mixfleet_hal::economics::Offer;
use mixfleet_hal::units::UsdPerHour;
use std::path::Path;

const COLUMNS: &str = "device_id, price_hourly and/or spot_hourly; optional: gpu_count, cloud, region, \
                       instance, tier, date, source";

/// The offers of a file. Rows without a device id (machines without accelerators) are none.
pub(crate) fn read(path: &Path) -> Result<Vec<Offer>> {
    let file = path.display().to_string();
    let bytes = std::fs::read(path).with_context(|| format!("cannot read the prices in {file}"))?;
    parse(&file, &bytes)
}

fn parse(file: &str, bytes: &[u8]) -> Result<Vec<Offer>> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).comment(Some(b'#')).from_reader(bytes);
    let columns = Columns(reader.headers().map_err(|error| malformed(file, &error))?.clone());
    let has = |column| columns.at(column).is_some();
    if !has("device_id") || !(has("price_hourly") || has("spot_hourly")) {
        return Err(anyhow!("{file}:1: the header lacks columns; needed are {COLUMNS}"));
    }
    let mut offers = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| malformed(file, &error))?;
        let line = record.position().map_or(0, csv::Position::line);
        offers.extend(Row { file, line, columns: &columns, record: &record }.offers()?);
    }
    Ok(offers)
}

fn malformed(file: &str, error: &csv::Error) -> anyhow::Error {
    let line = error.position().map_or(1, csv::Position::line);
    match error.kind() {
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => anyhow!(
            "{file}:{line}: the row has {len} fields and the header {expected_len}; quote fields that hold a comma"
        ),
        csv::ErrorKind::Utf8 { .. } => anyhow!("{file}:{line}: not UTF-8; save the file as UTF-8"),
        other => anyhow!("{file}:{line}: not CSV: {other:?}"),
    }
}

struct Columns(StringRecord);

impl Columns {
    fn at(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|column| column.eq_ignore_ascii_case(name))
    }
}

struct Row<'a> {
    file: &'a str,
    line: u64,
    columns: &'a Columns,
    record: &'a StringRecord,
}

impl Row<'_> {
    /// One offer that stays, one spot offer, both, or none.
    fn offers(&self) -> Result<Vec<Offer>> {
        let device = self.text("device_id");
        if device.is_empty() {
            return Ok(Vec::new());
        }
        let date = self.date()?;
        let devices = self.devices()?;
        let mut offers = Vec::new();
        for (column, spot) in [("price_hourly", false), ("spot_hourly", true)] {
            let Some(price) = self.price(column)? else { continue };
            offers.push(Offer {
                device: device.into(),
                price: UsdPerHour(price / devices),
                spot,
                provider: self.text("cloud").into(),
                tier: self.text("tier").into(),
                region: self.text("region").into(),
                source: self.source(),
                date: date.clone(),
            });
        }
        if offers.is_empty() {
            let what = "a device without a price; fill in price_hourly or spot_hourly, or drop the row";
            return Err(self.error("price_hourly", what));
        }
        Ok(offers)
    }

    fn text(&self, column: &str) -> &str {
        self.columns.at(column).and_then(|at| self.record.get(at)).unwrap_or_default()
    }

    fn source(&self) -> String {
        match self.text("source") {
            "" => self.file.into(),
            source => source.into(),
        }
    }

    /// A row's price is of the whole machine.
    fn devices(&self) -> Result<f64> {
        match self.text("gpu_count") {
            "" => Ok(1.0),
            text => match text.parse::<u32>() {
                Ok(count) if count > 0 => Ok(f64::from(count)),
                _ => Err(self.error("gpu_count", &format!("'{text}' is not a count of devices; 1 or more"))),
            },
        }
    }

    fn price(&self, column: &str) -> Result<Option<f64>> {
        let text = self.text(column);
        if text.is_empty() {
            return Ok(None);
        }
        match text.parse::<f64>() {
            Ok(price) if price.is_finite() && price > 0.0 => Ok(Some(price)),
            _ => Err(self.error(column, &format!("'{text}' is not a price; write $/h as in 2.69"))),
        }
    }

    fn date(&self) -> Result<Option<String>> {
        let text = self.text("date");
        let digits =
            |at: std::ops::Range<usize>| text.get(at).is_some_and(|t| t.bytes().all(|b| b.is_ascii_digit()));
        let well_formed = text.len() == 10
            && digits(0..4)
            && digits(5..7)
            && digits(8..10)
            && text.get(4..5) == Some("-")
            && text.get(7..8) == Some("-");
        match text {
            "" => Ok(None),
            _ if well_formed => Ok(Some(text.into())),
            _ => Err(self.error("date", &format!("'{text}' is not a date; write YYYY-MM-DD"))),
        }
    }

    fn error(&self, column: &str, what: &str) -> anyhow::Error {
        anyhow!("{}:{}: column {column}: {what}", self.file, self.line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::economics::{REFERENCE_OFFERS, Selection};

    fn error(text: &str) -> String {
        parse("offers.csv", text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_row_is_divided_by_its_devices_and_may_be_two_offers() {
        let text = "cloud,device_id,gpu_count,price_hourly,spot_hourly,date\n\
                    aws,H100-SXM-80GB,8,55.04,16,2026-07-20\n\
                    aws,,0,2.32,,2026-07-20\n\
                    acme,L4,,0.5,,\n";
        let offers = parse("offers.csv", text.as_bytes()).unwrap();
        let prices: Vec<(&str, f64, bool)> =
            offers.iter().map(|offer| (offer.device.as_str(), offer.price.0, offer.spot)).collect();
        assert_eq!(
            prices,
            [("H100-SXM-80GB", 6.88, false), ("H100-SXM-80GB", 2.0, true), ("L4", 0.5, false)]
        );
        assert_eq!((offers[0].date.as_deref(), offers[2].date.as_deref()), (Some("2026-07-20"), None));
        assert_eq!(offers[2].source, "offers.csv");
    }

    #[test]
    fn mistakes_are_told_with_file_line_column_and_remedy() {
        let head = "device_id,gpu_count,price_hourly,date\n";
        for (row, wanted) in [
            (
                "L4,1,cheap,",
                "offers.csv:2: column price_hourly: 'cheap' is not a price; write $/h as in 2.69",
            ),
            ("L4,1,-1,", "column price_hourly: '-1'"),
            ("L4,1,NaN,", "column price_hourly: 'NaN'"),
            ("L4,0,1,", "column gpu_count: '0'"),
            ("L4,1,,", "fill in price_hourly"),
            ("L4,1,1,May 2026", "column date: 'May 2026' is not a date; write YYYY-MM-DD"),
            ("L4,1", "offers.csv:2: the row has 2 fields and the header 4"),
        ] {
            let error = error(&format!("{head}{row}\n"));
            assert!(error.contains(wanted), "{error}");
        }
        assert!(error(&format!("{head}L4,1,1,\nL4,1,x,\n")).starts_with("offers.csv:3:"));
        assert!(error("id,price\nL4,1\n").contains("offers.csv:1: the header lacks columns"));
        assert!(error("").contains("the header lacks columns"));
        let latin = parse("offers.csv", b"device_id,price_hourly\nL4\xe9,1\n").unwrap_err().to_string();
        assert!(latin.contains("offers.csv:2: not UTF-8"), "{latin}");
    }

    /// The built-in prices are what the stated rule makes of the collection they come from, up to how
    /// that collection weighed several offers of one provider.
    #[test]
    fn the_rule_reproduces_the_built_in_prices() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/gpu-prices.csv");
        if !path.exists() {
            eprintln!("SKIPPED: ../shared/data/gpu-prices.csv is absent; the rule was not compared with it");
            return;
        }
        let offers = read(&path).unwrap();
        assert!(offers.len() > 1000, "{}", offers.len());
        let mut compared = 0;
        for reference in REFERENCE_OFFERS {
            let Some(price) = Selection::default().price(reference.id, &offers) else { continue };
            let ratio = price.usd_per_hour.0 / reference.usd_per_hour;
            assert!((0.85..=1.15).contains(&ratio), "{}: {price:?} against {reference:?}", reference.id);
            compared += 1;
        }
        assert!(compared >= 30, "{compared}");
    }
}
