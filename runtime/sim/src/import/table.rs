//! Tables with named columns, from CSV or Parquet.

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

/// A table of text cells. Row numbers in messages count from 1, without the header.
#[derive(Debug)]
pub(super) struct Table {
    name: String,
    columns: HashMap<String, usize>,
    rows: Vec<Vec<String>>,
}

/// One row of a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'a> {
    table: &'a Table,
    index: usize,
}

/// First bytes of a Parquet file.
const PARQUET: &[u8; 4] = b"PAR1";
/// First bytes of a file that stands for one in Git LFS.
const LFS_POINTER: &[u8] = b"version https://git-lfs";

impl Table {
    /// Reads the file at `path`; its content decides which format it has.
    ///
    /// # Errors
    /// A message with the file's name and the fault.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        let name = path.display().to_string();
        let failed = |cause: &dyn std::fmt::Display| format!("{name}: {cause}");
        let mut file = mixfleet_hal::files::open(path).map_err(|cause| failed(&cause))?;
        let mut start = Vec::new();
        file.by_ref()
            .take(LFS_POINTER.len() as u64)
            .read_to_end(&mut start)
            .and_then(|_| file.rewind())
            .map_err(|cause| failed(&cause))?;
        if start.starts_with(LFS_POINTER) {
            return Err(failed(
                &"a Git LFS pointer and not the table; run 'git lfs pull' where it was cloned",
            ));
        }
        let (columns, rows) = if start.starts_with(PARQUET) {
            // The crate panics on some files that are damaged inside.
            let read = std::panic::catch_unwind(|| parquet(file).map_err(|cause| cause.to_string()));
            read.unwrap_or_else(|_| Err("the Parquet file is damaged".into()))
        } else {
            csv(file).map_err(|cause| cause.to_string())
        }
        .map_err(|cause| failed(&cause))?;
        let columns = columns.into_iter().enumerate().map(|(at, column)| (column, at)).collect();
        Ok(Table { name, columns, rows })
    }

    pub(super) fn has(&self, columns: &[&str]) -> bool {
        columns.iter().all(|column| self.columns.contains_key(*column))
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        (0..self.rows.len()).map(|index| Row { table: self, index })
    }
}

impl<'a> Row<'a> {
    /// The text in the first of these columns that the table has; `None` if it is empty or there is none.
    pub(super) fn text(&self, columns: &[&str]) -> Option<&'a str> {
        let at = *columns.iter().find_map(|column| self.table.columns.get(*column))?;
        self.table.rows[self.index].get(at).map(|cell| cell.trim()).filter(|cell| !cell.is_empty())
    }

    /// The whole number in the first of these columns that the table has.
    ///
    /// # Errors
    /// A message with file, row, column and what stands there.
    pub(super) fn number(&self, columns: &[&str]) -> Result<u32, String> {
        let text = self.text(columns).unwrap_or_default();
        text.parse().map_err(|_| self.wrong(columns, text, "a whole number below 2^32"))
    }

    /// The positive number in a column.
    ///
    /// # Errors
    /// A message with file, row, column and what stands there.
    pub(super) fn positive(&self, column: &str) -> Result<f64, String> {
        let text = self.text(&[column]).unwrap_or_default();
        let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
        number.ok_or_else(|| self.wrong(&[column], text, "a number above 0"))
    }

    fn wrong(&self, columns: &[&str], text: &str, wanted: &str) -> String {
        let (file, row) = (&self.table.name, self.index + 1);
        format!("{file}, row {row}: {} is '{text}', expected {wanted}", columns.join(" or "))
    }
}

/// Names of the columns, and the rows.
type Cells = (Vec<String>, Vec<Vec<String>>);

fn csv(file: File) -> Result<Cells, csv::Error> {
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(file);
    let columns = reader.headers()?.iter().map(|column| column.trim().to_owned()).collect();
    let cells = |row: csv::StringRecord| row.iter().map(str::to_owned).collect();
    let rows = reader.records().map(|row| row.map(cells)).collect::<Result<_, _>>()?;
    Ok((columns, rows))
}

fn parquet(file: File) -> Result<Cells, parquet::errors::ParquetError> {
    let reader = SerializedFileReader::new(file)?;
    let fields = reader.metadata().file_metadata().schema().get_fields();
    let columns = fields.iter().map(|field| field.name().to_owned()).collect();
    let cell = |field: &Field| match field {
        Field::Null => String::new(),
        Field::Str(text) => text.clone(),
        Field::Float(number) => number.to_string(),
        Field::Double(number) => number.to_string(),
        other => other.to_string(),
    };
    let rows = reader.get_row_iter(None)?;
    let rows = rows.map(|row| Ok(row?.get_column_iter().map(|(_, field)| cell(field)).collect()));
    Ok((columns, rows.collect::<Result<_, parquet::errors::ParquetError>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::random::Stream;
    use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    use std::path::PathBuf;
    use std::sync::Arc;

    fn file(name: &str) -> PathBuf {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tmp/import");
        std::fs::create_dir_all(&directory).unwrap();
        directory.join(name)
    }

    /// A Parquet file with the columns `m`, `gemm_dtype` and `latency` and two rows.
    fn parquet_file(path: &Path) {
        let schema =
            "message m { required int64 m; required binary gemm_dtype (UTF8); required double latency; }";
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let mut writer =
            SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::default()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&[1, 4096], None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let names = ["bfloat16", "fp8"].map(ByteArray::from);
        column.typed::<ByteArrayType>().write_batch(&names, None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<DoubleType>().write_batch(&[0.25, 1.5e-3], None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
    }

    #[test]
    fn parquet_and_csv_with_the_same_cells_are_the_same_table() {
        let (parquet, csv) = (file("gemm_perf.parquet"), file("gemm_perf.txt"));
        parquet_file(&parquet);
        std::fs::write(&csv, "m,gemm_dtype,latency\n1,bfloat16,0.25\n4096,fp8,0.0015\n").unwrap();
        let [parquet, csv] = [parquet, csv].map(|path| Table::read(&path).unwrap());
        assert_eq!((&parquet.columns, &parquet.rows), (&csv.columns, &csv.rows));
        let row = parquet.rows().last().unwrap();
        assert_eq!((row.number(&["n", "m"]), row.text(&["gemm_dtype"])), (Ok(4096), Some("fp8")));
        assert_eq!(row.positive("latency"), Ok(0.0015));
    }

    #[test]
    fn a_damaged_parquet_file_is_an_error_or_a_table() {
        let path = file("damaged.parquet");
        parquet_file(&path);
        let whole = std::fs::read(&path).unwrap();
        let mut refused = 0;
        for case in 0..300 {
            let mut bytes = whole.clone();
            let mut random = Stream::new(case);
            for _ in 0..1 + random.below(4) {
                let at = usize::try_from(random.below(bytes.len() as u64)).unwrap();
                bytes[at] = random.next_u64().to_le_bytes()[0];
            }
            std::fs::write(&path, &bytes).unwrap();
            refused += usize::from(Table::read(&path).is_err());
        }
        assert!(refused > 50, "{refused}");
    }

    #[test]
    fn what_cannot_be_read_is_told_with_file_row_and_column() {
        let path = file("wrong.txt");
        std::fs::write(&path, "m,latency\n1.5,-2\n").unwrap();
        let table = Table::read(&path).unwrap();
        let row = table.rows().next().unwrap();
        let error = row.number(&["m"]).unwrap_err();
        assert!(error.contains("wrong.txt, row 1: m is '1.5'"), "{error}");
        assert!(row.positive("latency").unwrap_err().contains("a number above 0"));
        assert!(row.number(&["k"]).unwrap_err().contains("k is ''"));
        std::fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:00\n").unwrap();
        assert!(Table::read(&path).unwrap_err().contains("git lfs pull"));
        std::fs::write(&path, "PAR1 and nothing else").unwrap();
        assert!(Table::read(&path).unwrap_err().contains("wrong.txt"));
        assert!(Table::read(Path::new("/nowhere.csv")).unwrap_err().contains("nowhere"));
    }
}
