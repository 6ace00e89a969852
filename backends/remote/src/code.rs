//! How numbers, errors, operations and commands are written as bytes.
//!
//! Integers are little endian in groups of seven bits, so that small ones take a byte. An operation is
//! written and read by the list of its fields ([`OpSig::code`]).

use mixfleet_hal::cast::{low_u8, to_u8, to_usize};
use mixfleet_hal::op::Extent;
use mixfleet_hal::{BufferUsage, Cmd, Error, ErrorKind, FieldCodec, OpSig, Result, Slice};

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

/// The detail of an error that came without one.
const UNSAID: &str = "the other process does not say why";

/// Bytes that a peer wrote.
pub(crate) struct Taker<'a>(pub(crate) &'a [u8]);

/// The error for bytes that violate the protocol.
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

    /// A count of at most `most`.
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

/// Writes the fields of an operation.
struct FieldWriter<'a>(&'a mut Vec<u8>);

impl FieldCodec for FieldWriter<'_> {
    fn dim(&mut self, value: &mut u32) -> Result<()> {
        self.count(value)
    }
    fn count(&mut self, value: &mut u32) -> Result<()> {
        put(self.0, u64::from(*value));
        Ok(())
    }
    fn long(&mut self, value: &mut u64) -> Result<()> {
        put(self.0, *value);
        Ok(())
    }
    fn bits(&mut self, value: &mut u32) -> Result<()> {
        self.0.extend(value.to_le_bytes());
        Ok(())
    }
    fn flag(&mut self, value: &mut bool) -> Result<()> {
        self.0.push(u8::from(*value));
        Ok(())
    }
    fn choice<T: Copy + PartialEq>(&mut self, value: &mut T, of: &[T]) -> Result<()> {
        self.0.push(to_u8(of.iter().position(|one| one == value).unwrap_or_default()));
        Ok(())
    }
}

impl FieldCodec for Taker<'_> {
    fn dim(&mut self, value: &mut u32) -> Result<()> {
        FieldCodec::count(self, value)?;
        if *value == 0 { Err(malformed("a dimension is zero")) } else { Ok(()) }
    }
    fn count(&mut self, value: &mut u32) -> Result<()> {
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

/// Appends an operation.
pub(crate) fn put_sig(bytes: &mut Vec<u8>, sig: &OpSig) -> Result<()> {
    let kind =
        OpSig::BLANK.iter().position(|blank| std::mem::discriminant(blank) == std::mem::discriminant(sig));
    let kind = kind.ok_or_else(|| Error::unsupported(format!("{} has no number", sig.name())))?;
    bytes.push(to_u8(kind));
    sig.clone().code(&mut FieldWriter(bytes))
}

/// Reads an operation.
pub(crate) fn take_sig(from: &mut Taker<'_>) -> Result<OpSig> {
    let blank = OpSig::BLANK.get(usize::from(from.byte()?));
    let mut sig = *blank.ok_or_else(|| malformed("there is no such operation"))?;
    sig.code(from)?;
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
