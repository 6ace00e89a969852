//! A comparison as text, as a document and as a page.

pub(super) mod json;
pub(super) mod page;
pub(super) mod table;
