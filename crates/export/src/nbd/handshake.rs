//! The handshake: from the client's flags to the transmission phase, option by option. Looks at input and queues
//! output; touches no socket.
//!
//! Invariant: an option is parsed only when all of its data is there, and data that is longer than the input buffer is
//! skipped, so that the next option is parsed whatever this one was.

use super::connection::{Disconnect, ExportInfo};
use super::error::Error;
use super::input::Input;
use super::output::Output;
use super::protocol::*;
use super::reply;
use super::request::Negotiated;
use crate::ErrorKind;

/// Where the handshake stands after some input.
#[derive(Debug)]
pub enum Progress {
    /// More input, or sent output, is needed.
    NeedsInput,
    /// The client has chosen its export: requests follow.
    Transmission(Negotiated),
    /// The client has sent NBD_OPT_ABORT: the connection ends when the reply is sent.
    Aborted,
}

/// State of the handshake.
pub struct Handshake {
    client_flags: Option<u32>,
    structured: bool,
    /// Whether `base:allocation` is selected.
    allocation: bool,
    /// Options that have come.
    options: u32,
    /// Bytes of option data that have come.
    option_bytes: u64,
    /// An option whose data is too long: its number, and how many bytes of it are still to come.
    skipping: Option<(u32, u32)>,
    waits_for_output: bool,
}

/// Reads fields off the front of option data.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }

    fn u16(&mut self) -> Option<u16> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u16::from_be_bytes(*head))
    }

    fn u32(&mut self) -> Option<u32> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_be_bytes(*head))
    }

    /// A string behind its 32-bit length.
    fn string(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()? as usize;
        if len > MAX_STRING_BYTES {
            return None;
        }
        self.take(len)
    }
}

/// Why an option is refused: reply type and text.
type Refusal = (u32, &'static str);

const MALFORMED: Refusal = (REP_ERR_INVALID, "the option's data is malformed");
const TOO_LONG: Refusal = (REP_ERR_TOO_BIG, "the option's data is too long");
const NO_DATA: Refusal = (REP_ERR_INVALID, "this option takes no data");
const UNKNOWN_EXPORT: Refusal = (REP_ERR_UNKNOWN, "there is no export of this name");
const STRUCTURED_FIRST: Refusal = (REP_ERR_INVALID, "structured replies have to be negotiated first");

impl Handshake {
    pub fn new() -> Self {
        Handshake {
            client_flags: None,
            structured: false,
            allocation: false,
            options: 0,
            option_bytes: 0,
            skipping: None,
            waits_for_output: false,
        }
    }

    /// Whether [`Handshake::advance`] stopped because too many replies were unsent.
    pub fn waits_for_output(&self) -> bool {
        self.waits_for_output
    }

    /// Goes as far as the input allows.
    pub fn advance(
        &mut self,
        input: &mut Input,
        output: &mut Output,
        info: &ExportInfo,
    ) -> Result<Progress, Disconnect> {
        if !self.read_client_flags(input)? {
            return Ok(Progress::NeedsInput);
        }
        // The options of a client that reads no replies wait.
        self.waits_for_output = false;
        while output.bytes() < UNSENT_HANDSHAKE_BYTES {
            let progress = match self.skipping {
                Some((option, remaining)) => self.skip(option, remaining, input, output),
                None => self.next_option(input, output, info)?,
            };
            if let Some(progress) = progress {
                return Ok(progress);
            }
        }
        self.waits_for_output = true;
        Ok(Progress::NeedsInput)
    }

    /// Reads the client flags, which precede all options. Returns `false` while they have not arrived.
    fn read_client_flags(&mut self, input: &mut Input) -> Result<bool, Disconnect> {
        if self.client_flags.is_some() {
            return Ok(true);
        }
        let Some(bytes) = input.peek() else { return Ok(false) };
        let flags = u32::from_be_bytes(*bytes);
        input.consume(4);
        if flags & !u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) != 0 {
            let error = Error::protocol("unknown client flags");
            return Err(error.bits(flags.into()).into());
        }
        self.client_flags = Some(flags);
        Ok(true)
    }

    /// Takes the next option from the input and replies to it, or begins to skip its data. `None`: another option can follow.
    fn next_option(
        &mut self,
        input: &mut Input,
        output: &mut Output,
        info: &ExportInfo,
    ) -> Result<Option<Progress>, Disconnect> {
        let Some((option, len)) = peek_option(input)? else { return Ok(Some(Progress::NeedsInput)) };
        let fits = len as usize <= MAX_OPTION_BYTES;
        if fits && input.len() < OPTION_BYTES + len as usize {
            return Ok(Some(Progress::NeedsInput));
        }
        self.count_option(option, len)?;
        if !fits {
            input.consume(OPTION_BYTES);
            self.skipping = Some((option, len));
            return Ok(None);
        }
        let data = &input.unread()[OPTION_BYTES..OPTION_BYTES + len as usize];
        let progress = self.option(option, data, output, info)?;
        input.consume(OPTION_BYTES + len as usize);
        Ok(progress)
    }

    /// Counts an option that has come, and refuses what is beyond the limits of a handshake.
    fn count_option(&mut self, option: u32, len: u32) -> Result<(), Disconnect> {
        self.options += 1;
        self.option_bytes += u64::from(len);
        if self.options > MAX_OPTIONS {
            let error = Error::new(ErrorKind::Limit, "the handshake has too many options");
            return Err(error.above(self.options, MAX_OPTIONS).in_option(option).into());
        }
        if self.option_bytes > MAX_HANDSHAKE_BYTES {
            let error = Error::new(ErrorKind::Limit, "the options of the handshake have too many bytes");
            return Err(error.above(self.option_bytes, MAX_HANDSHAKE_BYTES).in_option(option).into());
        }
        Ok(())
    }

    /// Drops data of an option that is too long, and replies to the option when all of it was dropped. `None`: the next
    /// option can follow.
    fn skip(
        &mut self,
        option: u32,
        remaining: u32,
        input: &mut Input,
        output: &mut Output,
    ) -> Option<Progress> {
        let n = input.len().min(remaining as usize);
        input.consume(n);
        if n < remaining as usize {
            self.skipping = Some((option, remaining - n as u32));
            return Some(Progress::NeedsInput);
        }
        self.skipping = None;
        match option {
            OPT_ABORT => {
                reply::option(output, option, REP_ACK, &[]);
                return Some(Progress::Aborted);
            }
            OPT_LIST | OPT_INFO | OPT_GO | OPT_STRUCTURED_REPLY | OPT_LIST_META_CONTEXT => {
                refuse(output, option, TOO_LONG);
            }
            OPT_SET_META_CONTEXT => {
                self.allocation = false;
                refuse(output, option, TOO_LONG);
            }
            _ => unsupported(output, option),
        }
        None
    }

    fn option(
        &mut self,
        option: u32,
        data: &[u8],
        output: &mut Output,
        info: &ExportInfo,
    ) -> Result<Option<Progress>, Disconnect> {
        let result = match option {
            OPT_EXPORT_NAME => {
                if !info.has_name(data) {
                    let error = Error::new(ErrorKind::UnknownExport, "there is no export of this name");
                    return Err(error.in_option(option).into());
                }
                output.small(&info.size_bytes.to_be_bytes());
                output.small(&self.transmission_flags().to_be_bytes());
                if self.client_flags.unwrap_or(0) & u32::from(FLAG_NO_ZEROES) == 0 {
                    output.small(&[0; 124]);
                }
                return Ok(Some(Progress::Transmission(self.negotiated(info))));
            }
            OPT_ABORT => {
                reply::option(output, option, REP_ACK, &[]);
                return Ok(Some(Progress::Aborted));
            }
            OPT_LIST => list(option, data, output, info),
            OPT_INFO => self.info(option, data, output, info),
            OPT_GO => match self.info(option, data, output, info) {
                Ok(()) => {
                    reply::option(output, option, REP_ACK, &[]);
                    return Ok(Some(Progress::Transmission(self.negotiated(info))));
                }
                Err(refusal) => Err(refusal),
            },
            OPT_STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                Ok(())
            }
            OPT_STRUCTURED_REPLY => Err(NO_DATA),
            OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => self.contexts(option, data, output, info),
            _ => {
                unsupported(output, option);
                return Ok(None);
            }
        };
        match result {
            Ok(()) => reply::option(output, option, REP_ACK, &[]),
            Err(refusal) => refuse(output, option, refusal),
        }
        Ok(None)
    }

    fn negotiated(&self, info: &ExportInfo) -> Negotiated {
        Negotiated {
            size_bytes: info.size_bytes,
            structured: self.structured,
            block_status: self.structured && self.allocation,
        }
    }

    fn transmission_flags(&self) -> u16 {
        // CAN_MULTI_CONN: one map serves every connection, so a flush on one covers them all.
        FLAG_HAS_FLAGS
            | FLAG_SEND_FLUSH
            | FLAG_SEND_FUA
            | FLAG_SEND_TRIM
            | FLAG_SEND_WRITE_ZEROES
            | FLAG_CAN_MULTI_CONN
            | FLAG_SEND_FAST_ZERO
            | if self.structured { FLAG_SEND_DF } else { 0 }
    }

    /// INFO, and GO up to its acknowledgement.
    fn info(&self, option: u32, data: &[u8], output: &mut Output, info: &ExportInfo) -> Result<(), Refusal> {
        let mut fields = Fields(data);
        let name = fields.string().ok_or(MALFORMED)?;
        let count = fields.u16().ok_or(MALFORMED)?;
        let (mut wants_name, mut wants_description) = (false, false);
        for _ in 0..count {
            match fields.u16().ok_or(MALFORMED)? {
                INFO_NAME => wants_name = true,
                INFO_DESCRIPTION => wants_description = true,
                // EXPORT and BLOCK_SIZE are always sent; unknown ones are to be ignored.
                _ => {}
            }
        }
        if !fields.0.is_empty() {
            return Err(MALFORMED);
        }
        if !info.has_name(name) {
            return Err(UNKNOWN_EXPORT);
        }
        let mut send = |kind: u16, parts: [&[u8]; 3]| {
            let [a, b, c] = parts;
            reply::option(output, option, REP_INFO, &[&kind.to_be_bytes(), a, b, c]);
        };
        let flags = self.transmission_flags().to_be_bytes();
        send(INFO_EXPORT, [&info.size_bytes.to_be_bytes(), &flags, &[]]);
        if wants_name {
            send(INFO_NAME, [info.name.as_bytes(), &[], &[]]);
        }
        if wants_description && !info.description.is_empty() {
            send(INFO_DESCRIPTION, [info.description.as_bytes(), &[], &[]]);
        }
        let sizes = [MIN_BLOCK_BYTES, PREFERRED_BLOCK_BYTES, MAX_PAYLOAD_BYTES].map(u32::to_be_bytes);
        send(INFO_BLOCK_SIZE, [&sizes[0], &sizes[1], &sizes[2]]);
        Ok(())
    }

    /// LIST_META_CONTEXT and SET_META_CONTEXT up to their acknowledgement.
    fn contexts(
        &mut self,
        option: u32,
        data: &[u8],
        output: &mut Output,
        info: &ExportInfo,
    ) -> Result<(), Refusal> {
        let setting = option == OPT_SET_META_CONTEXT;
        if setting {
            // The earlier selection is dropped even if this one fails.
            self.allocation = false;
        }
        if !self.structured {
            return Err(STRUCTURED_FIRST);
        }
        let mut fields = Fields(data);
        let name = fields.string().ok_or(MALFORMED)?;
        let count = fields.u32().ok_or(MALFORMED)?;
        let mut matches = !setting && count == 0;
        for _ in 0..count {
            let query = fields.string().ok_or(MALFORMED)?;
            if !query.contains(&b':') {
                return Err((REP_ERR_INVALID, "a query has no namespace"));
            }
            // The bare namespace is a wildcard for listing only.
            matches |= query == BASE_ALLOCATION || (!setting && query == b"base:");
        }
        if !fields.0.is_empty() {
            return Err(MALFORMED);
        }
        if !info.has_name(name) {
            return Err(UNKNOWN_EXPORT);
        }
        if matches {
            let id = if setting { BASE_ALLOCATION_ID } else { 0 };
            reply::option(output, option, REP_META_CONTEXT, &[&id.to_be_bytes(), BASE_ALLOCATION]);
            self.allocation = self.allocation || setting;
        }
        Ok(())
    }
}

/// Number and length of the next option, once its header is there.
fn peek_option(input: &Input) -> Result<Option<(u32, u32)>, Disconnect> {
    let Some(header) = input.peek::<OPTION_BYTES>() else { return Ok(None) };
    let mut fields = Fields(header);
    if fields.take(8) != Some(&IHAVEOPT.to_be_bytes()) {
        return Err(Error::protocol("an option does not start with its magic number").into());
    }
    let (Some(option), Some(len)) = (fields.u32(), fields.u32()) else { return Ok(None) };
    if option == OPT_EXPORT_NAME && len as usize > MAX_STRING_BYTES {
        let error = Error::new(ErrorKind::Limit, "the export name has too many bytes");
        return Err(error.above(len, MAX_STRING_BYTES as u64).in_option(option).into());
    }
    Ok(Some((option, len)))
}

fn list(option: u32, data: &[u8], output: &mut Output, info: &ExportInfo) -> Result<(), Refusal> {
    if !data.is_empty() {
        return Err(NO_DATA);
    }
    let len = (info.name.len() as u32).to_be_bytes();
    let description = info.description.as_bytes();
    reply::option(output, option, REP_SERVER, &[&len, info.name.as_bytes(), description]);
    Ok(())
}

fn refuse(output: &mut Output, option: u32, (kind, text): Refusal) {
    reply::option(output, option, kind, &[text.as_bytes()]);
}

/// Options that this server does not know; STARTTLS is one of them.
fn unsupported(output: &mut Output, option: u32) {
    refuse(output, option, (REP_ERR_UNSUP, "this server does not have the option"));
}
