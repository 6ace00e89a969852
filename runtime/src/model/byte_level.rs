//! How byte-level vocabularies spell bytes: each as one printable character.

use mixfleet_hal::cast::to_u32;

/// The printable character that stands for a byte in byte-level vocabularies: GPT-2 keeps printable Latin-1
/// as it is and maps the other 68 bytes to U+0100 and up, in order.
pub(super) fn byte_symbol(byte: u8) -> char {
    let stays = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if stays(byte) {
        return char::from(byte);
    }
    let moved_before = to_u32((0..byte).filter(|b| !stays(*b)).count());
    char::from_u32(0x100 + moved_before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte of a [`byte_symbol`]; any other character stands for itself.
pub(super) fn symbol_bytes(symbol: char) -> Vec<u8> {
    match (0..=255).find(|byte| byte_symbol(*byte) == symbol) {
        Some(byte) => vec![byte],
        None => symbol.to_string().into_bytes(),
    }
}
