//! Serialisation of messages.

use super::super::session::SessionRefusal;
use super::CallError;
use bytes::{Buf, BufMut, Bytes};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::marker::PhantomData;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Code, Status};

/// Decodes `In` from the other end; outgoing messages are encoded earlier, so that waiting ones can be
/// counted in bytes.
pub(super) struct Words<In>(PhantomData<fn() -> In>);

impl<In> Default for Words<In> {
    fn default() -> Self {
        Words(PhantomData)
    }
}

impl<In: DeserializeOwned + Send + 'static> Codec for Words<In> {
    type Encode = Bytes;
    type Decode = In;
    type Encoder = Raw;
    type Decoder = Self;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Self {
        Words::default()
    }
}

pub(super) struct Raw;

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl<In: DeserializeOwned> Decoder for Words<In> {
    type Item = In;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<In>, Status> {
        let message = rmp_serde::from_read(buffer.reader());
        message.map(Some).map_err(|error| Status::invalid_argument(format!("not a message: {error}")))
    }
}

/// Encodes with field names, since the types omit fields and tag their variants.
pub(super) fn encode(message: &impl Serialize) -> Result<Bytes, Status> {
    let bytes = rmp_serde::to_vec_named(message);
    bytes.map(Bytes::from).map_err(|error| Status::internal(format!("a message cannot be written: {error}")))
}

pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Status> {
    rmp_serde::from_slice(bytes).map_err(|error| Status::invalid_argument(format!("not a greeting: {error}")))
}

impl From<SessionRefusal> for Status {
    fn from(refusal: SessionRefusal) -> Self {
        let details = encode(&refusal).unwrap_or_default();
        Status::with_details(Code::FailedPrecondition, refusal.to_string(), details)
    }
}

impl From<Status> for CallError {
    fn from(status: Status) -> Self {
        let refusal = (status.code() == Code::FailedPrecondition).then(|| decode(status.details()).ok());
        match refusal.flatten() {
            Some(refusal) => CallError::Refused(refusal),
            None => {
                CallError::Failed(with_causes(&status, format!("{}: {}", status.code(), status.message())))
            }
        }
    }
}

/// An error with its causes, since tonic's own messages leave out what happened.
pub(super) fn with_causes(error: &dyn std::error::Error, mut text: String) -> String {
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}
