//! Streams that are packed with gzip or zstd. Owns what zstd's decoder is given and asked.

use flate2::read::MultiGzDecoder;
use std::io::{self, Read};
use zstd_safe::{DCtx, InBuffer, OutBuffer};

/// Largest window of a zstd stream, as a power of two: what zstd itself accepts without being told otherwise.
const MOST_WINDOW_LOG: u32 = 27;
const INPUT_BYTES: usize = 128 << 10;

/// How a stream is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// It is not packed.
    None,
    /// It is a sequence of members of gzip.
    Gzip,
    /// It is a sequence of frames of zstd.
    Zstd,
}

impl Packing {
    /// How a stream is packed that begins like this. An archive of tar begins like neither.
    pub fn of_archive(beginning: &[u8]) -> Packing {
        match beginning {
            [0x1f, 0x8b, ..] => Packing::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Packing::Zstd,
            _ => Packing::None,
        }
    }
}

/// The plain bytes of a stream.
pub fn plain<'a>(packed: impl Read + 'a, packing: Packing) -> Box<dyn Read + 'a> {
    match packing {
        Packing::None => Box::new(packed),
        Packing::Gzip => Box::new(MultiGzDecoder::new(packed)),
        Packing::Zstd => Box::new(ZstdReader::new(packed)),
    }
}

/// The plain bytes of a stream of zstd.
struct ZstdReader<R> {
    packed: R,
    decoder: DCtx<'static>,
    input: Vec<u8>,
    /// Part of the input that was not decoded yet.
    from: usize,
    to: usize,
    /// Whether a frame has begun and not ended.
    is_inside: bool,
}

impl<R: Read> ZstdReader<R> {
    fn new(packed: R) -> ZstdReader<R> {
        let mut decoder = DCtx::create();
        // A stream that needs more is refused by the decoder.
        let _ = decoder.set_parameter(zstd_safe::DParameter::WindowLogMax(MOST_WINDOW_LOG));
        ZstdReader { packed, decoder, input: vec![0; INPUT_BYTES], from: 0, to: 0, is_inside: false }
    }
}

impl<R: Read> Read for ZstdReader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            let is_drained = self.from == self.to;
            if is_drained {
                (self.from, self.to) = (0, self.packed.read(&mut self.input)?);
            }
            let has_ended = is_drained && self.to == 0;
            if has_ended && !self.is_inside {
                return Ok(0);
            }
            let mut input = InBuffer::around(&self.input[self.from..self.to]);
            let mut output = OutBuffer::around(&mut *into);
            let left = self.decoder.decompress_stream(&mut output, &mut input);
            let left = left.map_err(|code| {
                let why = format!("zstd: {}", zstd_safe::get_error_name(code));
                io::Error::new(io::ErrorKind::InvalidData, why)
            })?;
            let (taken, made) = (input.pos(), output.pos());
            self.from += taken;
            self.is_inside = left != 0;
            if made > 0 {
                return Ok(made);
            }
            if has_ended && self.is_inside {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "zstd: the stream is cut"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unpacked(packed: &[u8], packing: Packing) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        plain(packed, packing).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    #[test]
    fn streams_are_unpacked_whole_or_refused() {
        let plain: Vec<u8> = (0..3_000_000_u64).map(|n| ((n * n) >> 9) as u8).collect();
        let frame = spillway_registry::compress(&plain);
        assert_eq!(Packing::of_archive(&frame), Packing::Zstd);
        assert!(unpacked(&frame, Packing::Zstd).unwrap() == plain);
        let two = [frame.clone(), spillway_registry::compress(b"more")].concat();
        assert!(unpacked(&two, Packing::Zstd).unwrap() == [&plain[..], b"more"].concat());
        assert_eq!(unpacked(b"", Packing::Zstd).unwrap(), b"");
        for len in [1, 3, 4, 5, 100, frame.len() / 2, frame.len() - 1] {
            assert!(unpacked(&frame[..len], Packing::Zstd).is_err(), "{len}");
        }
        assert!(unpacked(b"rubbish", Packing::Zstd).is_err());
        let mut packed = Vec::new();
        let level = flate2::Compression::fast();
        flate2::read::GzEncoder::new(&plain[..], level).read_to_end(&mut packed).unwrap();
        assert_eq!(Packing::of_archive(&packed), Packing::Gzip);
        assert!(unpacked(&packed, Packing::Gzip).unwrap() == plain);
        for len in [1, 12, packed.len() / 2, packed.len() - 1] {
            assert!(unpacked(&packed[..len], Packing::Gzip).is_err(), "{len}");
        }
        assert_eq!(Packing::of_archive(b"disk/"), Packing::None);
        assert_eq!(Packing::of_archive(b""), Packing::None);
    }
}
