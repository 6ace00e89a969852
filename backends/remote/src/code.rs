//! How numbers, errors, operations and commands are written as bytes.
//!
//! Integers are little endian in groups of seven bits, so that small ones take a byte. An operation is
//! written and read by one list of its fields, [`fields`].

use mixfleet_hal::cast::{low_u8, to_u8, to_usize};
use mixfleet_hal::op::Extent;
use mixfleet_hal::{
    BufferUsage, Cmd, CodeKind, ColumnsOf, DType, Error, ErrorKind, ExpertRouting, GroupedRows, KvShape,
    LatentKv, MatrixKind, OpSig, Quantised, Result, RotaryPart, Scalar, ScaleKind, Scoring, Slice, ZeroKind,
};

/// The longest text of an error.
const TEXT_BYTES_MAX: usize = 4096;

/// Keys, and pairs of a query and a key, that one operation may have: more than any memory holds.
const COUNT_MAX: u64 = 1 << 48;

/// Appends a number.
pub(crate) fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(low_u8(number) | 0x80);
        number >>= 7;
    }
    bytes.push(low_u8(number));
}

/// Appends bytes after their number.
pub(crate) fn put_bytes(bytes: &mut Vec<u8>, part: &[u8]) {
    put(bytes, part.len() as u64);
    bytes.extend_from_slice(part);
}

/// Appends a failure.
pub(crate) fn put_error(bytes: &mut Vec<u8>, error: &Error) {
    let kind = KINDS.iter().position(|kind| *kind == error.kind).unwrap_or(KINDS.len() - 1);
    bytes.push(to_u8(kind));
    let mut end = error.detail.len().min(TEXT_BYTES_MAX);
    while !error.detail.is_char_boundary(end) {
        end -= 1;
    }
    put_bytes(bytes, &error.detail.as_bytes()[..end]);
}

const KINDS: [ErrorKind; 8] = [
    ErrorKind::OutOfMemory,
    ErrorKind::Unsupported,
    ErrorKind::DeviceLost,
    ErrorKind::Timeout,
    ErrorKind::Invalid,
    ErrorKind::Corrupt,
    ErrorKind::Closed,
    ErrorKind::Other,
];

const USAGES: [BufferUsage; 4] =
    [BufferUsage::Weights, BufferUsage::Kv, BufferUsage::Activations, BufferUsage::Staging];

/// The number that stands for a usage.
pub(crate) fn usage_code(usage: BufferUsage) -> u64 {
    USAGES.iter().position(|other| *other == usage).unwrap_or_default() as u64
}

const ZEROS: [ZeroKind; 3] = [ZeroKind::Middle, ZeroKind::Points, ZeroKind::Minima];

const DTYPES: [DType; 6] = [DType::F32, DType::Bf16, DType::F16, DType::F8E4m3, DType::U32, DType::I8];

/// The detail of an error that came without one.
const UNSAID: &str = "the other process does not say why";

/// Bytes that a peer wrote.
pub(crate) struct Taker<'a>(pub(crate) &'a [u8]);

/// What is wrong with bytes that nobody who follows the protocol writes.
fn malformed(what: &str) -> Error {
    Error::invalid(format!("a message of the other process is malformed: {what}"))
}

impl<'a> Taker<'a> {
    pub(crate) fn byte(&mut self) -> Result<u8> {
        let (&first, rest) = self.0.split_first().ok_or_else(|| malformed("it is too short"))?;
        self.0 = rest;
        Ok(first)
    }

    pub(crate) fn number(&mut self) -> Result<u64> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(malformed("a number is too long"))
    }

    /// A number of things, of which there are at most `most`.
    pub(crate) fn count(&mut self, most: usize) -> Result<usize> {
        let number = self.number()?;
        usize::try_from(number).ok().filter(|&count| count <= most).ok_or_else(|| malformed("too many"))
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk().ok_or_else(|| malformed("it is too short"))?;
        self.0 = rest;
        Ok(*first)
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8]> {
        let length = self.number()?;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let (part, rest) = self.0.split_at_checked(length).ok_or_else(|| malformed("it is too short"))?;
        self.0 = rest;
        Ok(part)
    }

    pub(crate) fn error(&mut self) -> Result<Error> {
        let kind = *KINDS.get(usize::from(self.byte()?)).unwrap_or(&ErrorKind::Other);
        let detail = String::from_utf8_lossy(self.bytes()?);
        Ok(Error::new(kind, if detail.trim().is_empty() { UNSAID.into() } else { detail }))
    }

    pub(crate) fn usage(&mut self) -> Result<BufferUsage> {
        let usage = USAGES.get(self.count(USAGES.len())?);
        usage.copied().ok_or_else(|| malformed("there is no such usage"))
    }

    /// Checks that nothing is left.
    pub(crate) fn end(&self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(malformed("it is too long")) }
    }
}

/// Writes or reads the fields of an operation.
trait Fields {
    /// A dimension, which is not zero.
    fn dim(&mut self, value: &mut u32) -> Result<()>;
    /// A number that may be zero.
    fn number(&mut self, value: &mut u32) -> Result<()>;
    fn long(&mut self, value: &mut u64) -> Result<()>;
    fn bits(&mut self, value: &mut u32) -> Result<()>;
    fn flag(&mut self, value: &mut bool) -> Result<()>;

    /// One of a few, as its number among them.
    fn choice<T: Copy + PartialEq>(&mut self, value: &mut T, of: &[T]) -> Result<()>;

    fn quantised(&mut self, value: &mut Quantised) -> Result<()> {
        let Quantised { code, group_rows, group_columns, scale, zero, outer } = value;
        self.choice(code, &CodeKind::ALL)?;
        self.dim(group_rows)?;
        self.dim(group_columns)?;
        self.choice(scale, &ScaleKind::ALL)?;
        self.choice(zero, &ZEROS)?;
        self.flag(outer)
    }

    /// Weights that are quantised or not.
    fn stored(&mut self, value: &mut MatrixKind) -> Result<()> {
        let mut quantised = value.quantised().is_some();
        self.flag(&mut quantised)?;
        *value = match (quantised, *value) {
            (true, MatrixKind::Plain(_)) => MatrixKind::Quantised(Quantised::MXFP4),
            (false, MatrixKind::Quantised(_)) => PLAIN,
            (_, same) => same,
        };
        match value {
            MatrixKind::Plain(dtype) => self.dtype(dtype),
            MatrixKind::Quantised(how) => self.quantised(how),
        }
    }

    fn scalar(&mut self, value: &mut Scalar) -> Result<()> {
        let mut bits = value.0.to_bits();
        self.bits(&mut bits)?;
        *value = Scalar(f32::from_bits(bits));
        Ok(())
    }

    fn window(&mut self, value: &mut Option<u32>) -> Result<()> {
        // no window has no tokens
        let mut tokens = value.unwrap_or(0);
        self.number(&mut tokens)?;
        *value = (tokens > 0).then_some(tokens);
        Ok(())
    }

    fn routing(&mut self, value: &mut ExpertRouting) -> Result<()> {
        let ExpertRouting { experts, active, scoring, groups, groups_active, group_best, normalise, scale } =
            value;
        [experts, active, groups, groups_active, group_best].into_iter().try_for_each(|dim| self.dim(dim))?;
        let mut by_sigmoid = *scoring == Scoring::Sigmoid;
        self.flag(&mut by_sigmoid)?;
        *scoring = if by_sigmoid { Scoring::Sigmoid } else { Scoring::Softmax };
        self.flag(normalise)?;
        self.scalar(scale)
    }

    fn grouped(&mut self, value: &mut GroupedRows) -> Result<()> {
        let GroupedRows { choices, fan, experts, touched, others } = value;
        [choices, fan, experts].into_iter().try_for_each(|dim| self.dim(dim))?;
        self.number(touched)?;
        self.number(others)
    }

    fn dtype(&mut self, value: &mut DType) -> Result<()> {
        self.choice(value, &DTYPES)
    }

    fn kv(&mut self, value: &mut KvShape) -> Result<()> {
        let KvShape { kv_heads, head_dim, page_tokens, dtype, latent } = value;
        self.dim(kv_heads)?;
        self.dim(head_dim)?;
        self.dim(page_tokens)?;
        self.dtype(dtype)?;
        // values apart have no rank
        let LatentKv { mut rank, mut scale } = latent.unwrap_or(LatentKv { rank: 0, scale: Scalar(0.0) });
        self.number(&mut rank)?;
        if rank > 0 {
            self.scalar(&mut scale)?;
        }
        *latent = (rank > 0).then_some(LatentKv { rank, scale });
        Ok(())
    }

    fn part(&mut self, value: &mut Option<RotaryPart>) -> Result<()> {
        // all of a head has no length here
        let none = RotaryPart { first: 0, length: 0, interleaved: false };
        let RotaryPart { mut first, mut length, mut interleaved } = value.unwrap_or(none);
        self.number(&mut length)?;
        if length > 0 {
            self.number(&mut first)?;
            self.flag(&mut interleaved)?;
        }
        *value = (length > 0).then_some(RotaryPart { first, length, interleaved });
        Ok(())
    }

    fn columns(&mut self, value: &mut ColumnsOf) -> Result<()> {
        self.dim(&mut value.row)?;
        self.number(&mut value.first)
    }
}

impl Fields for Vec<u8> {
    fn dim(&mut self, value: &mut u32) -> Result<()> {
        self.number(value)
    }
    fn number(&mut self, value: &mut u32) -> Result<()> {
        put(self, u64::from(*value));
        Ok(())
    }
    fn long(&mut self, value: &mut u64) -> Result<()> {
        put(self, *value);
        Ok(())
    }
    fn bits(&mut self, value: &mut u32) -> Result<()> {
        self.extend(value.to_le_bytes());
        Ok(())
    }
    fn flag(&mut self, value: &mut bool) -> Result<()> {
        self.push(u8::from(*value));
        Ok(())
    }
    fn choice<T: Copy + PartialEq>(&mut self, value: &mut T, of: &[T]) -> Result<()> {
        self.push(to_u8(of.iter().position(|one| one == value).unwrap_or_default()));
        Ok(())
    }
}

impl Fields for Taker<'_> {
    fn dim(&mut self, value: &mut u32) -> Result<()> {
        Fields::number(self, value)?;
        if *value == 0 { Err(malformed("a dimension is zero")) } else { Ok(()) }
    }
    fn number(&mut self, value: &mut u32) -> Result<()> {
        *value = u32::try_from(Taker::number(self)?).map_err(|_| malformed("a dimension is too large"))?;
        Ok(())
    }
    fn long(&mut self, value: &mut u64) -> Result<()> {
        *value = Taker::number(self)?;
        if *value > COUNT_MAX { Err(malformed("a number is too large")) } else { Ok(()) }
    }
    fn bits(&mut self, value: &mut u32) -> Result<()> {
        *value = u32::from_le_bytes(self.array()?);
        Ok(())
    }
    fn flag(&mut self, value: &mut bool) -> Result<()> {
        *value = self.byte()? != 0;
        Ok(())
    }
    fn choice<T: Copy + PartialEq>(&mut self, value: &mut T, of: &[T]) -> Result<()> {
        let one = of.get(usize::from(self.byte()?));
        *value = *one.ok_or_else(|| malformed("there is no such dtype"))?;
        Ok(())
    }
}

const F32: DType = DType::F32;
const PLAIN: MatrixKind = MatrixKind::Plain(F32);
const KV: KvShape = KvShape { kv_heads: 0, head_dim: 0, page_tokens: 0, dtype: F32, latent: None };
const COLUMNS: ColumnsOf = ColumnsOf { row: 0, first: 0 };

const GROUPED: GroupedRows = GroupedRows { choices: 0, fan: 0, experts: 0, touched: 0, others: 0 };

/// An operation of each kind, in the order of their numbers.
const BLANK: [OpSig; 22] = [
    OpSig::Embed { tokens: 0, vocab: 0, hidden: 0, table: F32, out: F32 },
    OpSig::RmsNorm { rows: 0, cols: 0, eps: Scalar(0.0), x: F32, weight: F32, out: F32 },
    OpSig::Gemm { m: 0, n: 0, k: 0, x: F32, weight: F32, out: F32, bias: false, accumulate: false },
    OpSig::Rope { tokens: 0, heads: 0, head_dim: 0, part: None, x: F32 },
    OpSig::KvWrite { tokens: 0, x: F32, kv: KV },
    OpSig::AttnPrefill {
        tokens: 0,
        sequences: 0,
        pairs: 0,
        kv_tokens: 0,
        heads: 0,
        pages_max: 0,
        window: None,
        sinks: false,
        x: F32,
        kv: KV,
    },
    OpSig::AttnDecode { sequences: 0, kv_tokens: 0, heads: 0, pages_max: 0, x: F32, kv: KV },
    OpSig::AttnMerge { parts: 0, rows: 0, head_dim: 0, sinks: 0, out: F32 },
    OpSig::SiluMul { elements: 0, x: F32 },
    OpSig::Add { elements: 0, x: F32 },
    OpSig::Sample { rows: 0, cols: 0, history: 0, tops: 0 },
    OpSig::Copy { bytes: 0 },
    OpSig::Fill { bytes: 0, word: 0 },
    OpSig::KvGather { tokens: 0, kv: KV, wire: F32 },
    OpSig::KvScatter { tokens: 0, kv: KV, wire: F32 },
    OpSig::ClampedSwiglu { elements: 0, alpha: Scalar(0.0), limit: Scalar(0.0), x: F32 },
    OpSig::Route { tokens: 0, bias: false, routing: ExpertRouting::softmax(0, 0, false) },
    OpSig::GroupedGemm { grouped: GROUPED, n: 0, k: 0, x: F32, weight: PLAIN, out: F32, bias: false },
    OpSig::Combine { tokens: 0, active: 0, cols: 0, x: F32, accumulate: false },
    OpSig::QuantisedEmbed { tokens: 0, vocab: 0, hidden: 0, table: Quantised::MXFP4, out: F32 },
    OpSig::QuantisedGemm {
        m: 0,
        n: 0,
        k: 0,
        x: F32,
        weight: Quantised::MXFP4,
        out: F32,
        bias: false,
        accumulate: false,
    },
    OpSig::CopyColumns { rows: 0, cols: 0, from: COLUMNS, to: COLUMNS, x: F32 },
];

/// The fields of an operation in their order.
fn fields(sig: &mut OpSig, by: &mut impl Fields) -> Result<()> {
    match sig {
        OpSig::Embed { tokens, vocab, hidden, table, out } => {
            [tokens, vocab, hidden].into_iter().try_for_each(|dim| by.dim(dim))?;
            [table, out].into_iter().try_for_each(|dtype| by.dtype(dtype))
        }
        OpSig::RmsNorm { rows, cols, eps, x, weight, out } => {
            [rows, cols].into_iter().try_for_each(|dim| by.dim(dim))?;
            by.scalar(eps)?;
            [x, weight, out].into_iter().try_for_each(|dtype| by.dtype(dtype))
        }
        OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate } => {
            [m, n, k].into_iter().try_for_each(|dim| by.dim(dim))?;
            [x, weight, out].into_iter().try_for_each(|dtype| by.dtype(dtype))?;
            by.flag(bias)?;
            by.flag(accumulate)
        }
        OpSig::QuantisedEmbed { tokens, vocab, hidden, table, out } => {
            [tokens, vocab, hidden].into_iter().try_for_each(|dim| by.dim(dim))?;
            by.quantised(table)?;
            by.dtype(out)
        }
        OpSig::QuantisedGemm { m, n, k, x, weight, out, bias, accumulate } => {
            [m, n, k].into_iter().try_for_each(|dim| by.dim(dim))?;
            by.quantised(weight)?;
            [x, out].into_iter().try_for_each(|dtype| by.dtype(dtype))?;
            by.flag(bias)?;
            by.flag(accumulate)
        }
        OpSig::Rope { tokens, heads, head_dim, part, x } => {
            [tokens, heads, head_dim].into_iter().try_for_each(|dim| by.dim(dim))?;
            by.part(part)?;
            by.dtype(x)
        }
        OpSig::CopyColumns { rows, cols, from, to, x } => {
            [rows, cols].into_iter().try_for_each(|dim| by.dim(dim))?;
            by.columns(from)?;
            by.columns(to)?;
            by.dtype(x)
        }
        OpSig::KvWrite { tokens, x, kv } => {
            by.dim(tokens)?;
            by.dtype(x)?;
            by.kv(kv)
        }
        OpSig::AttnPrefill {
            tokens,
            sequences,
            pairs,
            kv_tokens,
            heads,
            pages_max,
            window,
            sinks,
            x,
            kv,
        } => {
            [tokens, sequences, heads].into_iter().try_for_each(|dim| by.dim(dim))?;
            by.number(pages_max)?;
            by.long(pairs)?;
            by.long(kv_tokens)?;
            by.window(window)?;
            by.flag(sinks)?;
            by.dtype(x)?;
            by.kv(kv)
        }
        OpSig::AttnDecode { sequences, kv_tokens, heads, pages_max, x, kv } => {
            [sequences, heads].into_iter().try_for_each(|dim| by.dim(dim))?;
            by.number(pages_max)?;
            by.long(kv_tokens)?;
            by.dtype(x)?;
            by.kv(kv)
        }
        OpSig::AttnMerge { parts, rows, head_dim, sinks, out } => {
            [parts, rows, head_dim].into_iter().try_for_each(|dim| by.dim(dim))?;
            by.number(sinks)?;
            by.dtype(out)
        }
        OpSig::SiluMul { elements, x } | OpSig::Add { elements, x } => {
            by.long(elements)?;
            by.dtype(x)
        }
        OpSig::ClampedSwiglu { elements, alpha, limit, x } => {
            by.long(elements)?;
            [alpha, limit].into_iter().try_for_each(|scalar| by.scalar(scalar))?;
            by.dtype(x)
        }
        OpSig::Route { tokens, bias, routing } => {
            by.dim(tokens)?;
            by.flag(bias)?;
            by.routing(routing)
        }
        OpSig::GroupedGemm { grouped, n, k, x, weight, out, bias } => {
            by.grouped(grouped)?;
            [n, k].into_iter().try_for_each(|dim| by.dim(dim))?;
            by.stored(weight)?;
            [x, out].into_iter().try_for_each(|dtype| by.dtype(dtype))?;
            by.flag(bias)
        }
        OpSig::Combine { tokens, active, cols, x, accumulate } => {
            [tokens, active, cols].into_iter().try_for_each(|dim| by.dim(dim))?;
            by.dtype(x)?;
            by.flag(accumulate)
        }
        OpSig::Sample { rows, cols, history, tops } => {
            [rows, cols].into_iter().try_for_each(|dim| by.dim(dim))?;
            [history, tops].into_iter().try_for_each(|number| by.number(number))
        }
        OpSig::Copy { bytes } => by.long(bytes),
        OpSig::Fill { bytes, word } => {
            by.long(bytes)?;
            by.bits(word)
        }
        OpSig::KvGather { tokens, kv, wire } | OpSig::KvScatter { tokens, kv, wire } => {
            by.dim(tokens)?;
            by.kv(kv)?;
            by.dtype(wire)
        }
    }
}

/// Appends an operation.
pub(crate) fn put_sig(bytes: &mut Vec<u8>, sig: &OpSig) -> Result<()> {
    let kind = BLANK.iter().position(|blank| std::mem::discriminant(blank) == std::mem::discriminant(sig));
    let kind = kind.ok_or_else(|| Error::unsupported(format!("{} has no number", sig.name())))?;
    bytes.push(to_u8(kind));
    fields(&mut sig.clone(), bytes)
}

/// Reads an operation.
pub(crate) fn take_sig(from: &mut Taker<'_>) -> Result<OpSig> {
    let blank = BLANK.get(usize::from(from.byte()?));
    let mut sig = *blank.ok_or_else(|| malformed("there is no such operation"))?;
    fields(&mut sig, from)?;
    Ok(sig)
}

/// Appends commands; `number` gives a buffer's.
pub(crate) fn put_cmds(
    bytes: &mut Vec<u8>,
    cmds: &[Cmd],
    number: impl Fn(&Slice) -> Result<u64>,
) -> Result<()> {
    put(bytes, cmds.len() as u64);
    for cmd in cmds {
        put_sig(bytes, cmd.sig())?;
        for (operand, arg) in cmd.sig().operands().iter().zip(cmd.args()) {
            put(bytes, number(arg)?);
            put(bytes, arg.offset);
            // the operation says how long others are
            if matches!(operand.extent, Extent::PagesOf(_)) {
                put(bytes, arg.bytes);
            }
        }
    }
    Ok(())
}

/// Reads commands and checks them; `buffer` gives the whole buffer of a number.
pub(crate) fn take_cmds(from: &mut Taker<'_>, buffer: impl Fn(u64) -> Result<Slice>) -> Result<Vec<Cmd>> {
    // a command has four bytes at least
    let count = from.count(from.0.len() / 4 + 1)?;
    let mut cmds = Vec::new();
    for _ in 0..count {
        let sig = take_sig(from)?;
        let mut args = Vec::new();
        for operand in sig.operands() {
            let whole = buffer(from.number()?)?;
            let offset = from.number()?;
            let bytes = match operand.extent {
                Extent::Exactly(elements) => elements.checked_mul(operand.dtype.size_bytes()),
                Extent::PagesOf(_) => Some(from.number()?),
            };
            let bytes = bytes.ok_or_else(|| malformed("an operand is too large"))?;
            args.push(inside(&whole, offset, bytes)?);
        }
        cmds.push(Cmd::new(sig, &args)?);
    }
    Ok(cmds)
}

/// A part of a buffer.
pub(crate) fn inside(whole: &Slice, offset: u64, bytes: u64) -> Result<Slice> {
    if offset.checked_add(bytes).is_none_or(|end| end > whole.bytes) {
        let message = format!("bytes {offset}+{bytes} leave a buffer of {}", whole.bytes);
        return Err(Error::invalid(message));
    }
    Ok(whole.range(offset, bytes))
}

/// Appends a part of a buffer.
pub(crate) fn put_slice(bytes: &mut Vec<u8>, number: u64, slice: &Slice) {
    [number, slice.offset, slice.bytes].into_iter().for_each(|number| put(bytes, number));
}

/// Reads a part of a buffer that is at most `most` bytes long.
pub(crate) fn take_slice(
    from: &mut Taker<'_>,
    most: usize,
    buffer: impl Fn(u64) -> Result<Slice>,
) -> Result<Slice> {
    let whole = buffer(from.number()?)?;
    let (offset, bytes) = (from.number()?, from.number()?);
    if bytes > most as u64 {
        return Err(malformed("too many bytes at a time"));
    }
    inside(&whole, offset, bytes)
}

/// The bytes that a number says, of at most `most`.
pub(crate) fn length(number: u64, most: usize) -> Result<usize> {
    if number > most as u64 { Err(malformed("too many bytes at a time")) } else { Ok(to_usize(number)) }
}

#[cfg(test)]
#[path = "code_tests.rs"]
mod tests;
