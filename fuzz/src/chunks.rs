//! The index of an image, and the frames of its chunks: what is read is what was written, and nothing takes more memory than its size
//! allows.

use crate::input::Input;
use crate::memory::peak_of;
use spillway_image::digests::{CHUNK_BYTES, Root, of_chunk};
use spillway_registry::{Index, Manifest, compress, open_frame};

/// What a parser may allocate beside what it returns: messages, and parts of fixed size.
const BESIDE: usize = 16 << 10;

/// Reads the bytes as an index.
pub fn registry_index(data: &[u8]) {
    let (parsed, peak) = peak_of(|| Index::parse(data));
    assert!(peak <= data.len() + BESIDE, "{peak} bytes for {}", data.len());
    let Ok(index) = parsed else { return };
    assert_eq!(index.to_bytes(), data, "an index has one form");
    assert_eq!(Index::file_bytes(index.size_bytes, index.chunk_bytes), data.len() as u64);
    let lengths: Vec<u64> = (0..index.digests.len()).map(|chunk| index.len_of(chunk)).collect();
    assert!(lengths.iter().all(|len| (1..=CHUNK_BYTES).contains(len)));
    assert_eq!(lengths.iter().sum::<u64>(), index.size_bytes);
    let mut root = Root::new(index.size_bytes);
    index.digests.iter().for_each(|digest| root.add(digest));
    assert_eq!(root.finish_bytes(), index.root());
    // Its manifest belongs to it and to no other.
    let manifest = Manifest::of(&index);
    assert_eq!(manifest.index(data).as_ref(), Ok(&index));
    assert_eq!(manifest.index_bytes(), data.len() as u64);
    match Manifest::parse(&manifest.to_bytes(), &index.root()) {
        Ok(parsed) => assert_eq!(parsed, manifest),
        Err(why) => assert!(why.contains("disk"), "only its size can be refused: {why}"),
    }
    if let Some(last) = data.len().checked_sub(1) {
        assert!(manifest.index(&data[..last]).is_err());
    }
}

/// Opens frames. The first byte says which: the bytes themselves as the frame of some chunk, or the frame of a chunk that repeats
/// them, which is then changed in some places, or compared with another digest.
pub fn chunk_frame(data: &[u8]) {
    let Some((&kind, bytes)) = data.split_first() else { return };
    let mut input = Input(bytes);
    match kind % 4 {
        0 => {
            // What any chunk could be: the length is not even that of the content.
            let len = len(&mut input);
            open(input.0, &content(b"any", len), len);
        }
        1 => {
            let (plain, _) = chunk(&mut input);
            open(&compress(&plain), &plain, plain.len() as u64);
        }
        2 => {
            let (plain, changes) = chunk(&mut input);
            let mut frame = compress(&plain);
            for change in changes.chunks_exact(4) {
                let at = usize::from(u16::from_le_bytes([change[0], change[1]]));
                match change[2] % 4 {
                    0 => frame.truncate(at.min(frame.len())),
                    1 => frame.push(change[3]),
                    _ => {
                        let len = frame.len().max(1);
                        if let Some(byte) = frame.get_mut(at % len) {
                            *byte ^= change[3];
                        }
                    }
                }
            }
            open(&frame, &plain, plain.len() as u64);
        }
        _ => {
            let (plain, changes) = chunk(&mut input);
            let frame = compress(&plain);
            let mut digest = of_chunk(&plain);
            let bit = usize::from(changes.first().copied().unwrap_or_default());
            digest[bit / 8] ^= 1 << (bit % 8);
            assert!(open_frame(&frame, &digest, plain.len() as u64).is_err(), "another digest");
            assert!(open_frame(&frame, &of_chunk(&plain), plain.len() as u64 + 1).is_err(), "another length");
        }
    }
}

/// Opens a frame that should be this chunk's: it is, or it is refused.
fn open(frame: &[u8], plain: &[u8], len: u64) {
    let (opened, peak) = peak_of(|| open_frame(frame, &of_chunk(plain), len));
    assert!(peak as u64 <= len + BESIDE as u64, "{peak} bytes for a chunk of {len}");
    if let Ok(opened) = opened {
        assert!(opened == plain, "its digest was compared");
    }
}

/// A chunk whose length and content the input says, and the rest of the input.
fn chunk<'a>(input: &mut Input<'a>) -> (Vec<u8>, &'a [u8]) {
    let len = len(input);
    let most = usize::from(input.u8());
    let word = input.bytes(most);
    (content(word, len), input.0)
}

/// A length, mostly a small one, so that many are tried.
fn len(input: &mut Input<'_>) -> u64 {
    match input.u8() {
        0 => CHUNK_BYTES - u64::from(input.u16()),
        small => u64::from(small) * 16,
    }
}

fn content(word: &[u8], len: u64) -> Vec<u8> {
    let word = if word.is_empty() { &[0] } else { word };
    let mut content = word.repeat(len as usize / word.len() + 1);
    content.truncate(len as usize);
    content
}

/// Indexes of images, and one that lacks its end.
pub fn index_seeds() -> Vec<Vec<u8>> {
    let index = |size_bytes: u64| {
        let digests = (0..size_bytes.div_ceil(CHUNK_BYTES)).map(|n| [n as u8; 32]).collect();
        Index { size_bytes, chunk_bytes: CHUNK_BYTES, digests }.to_bytes()
    };
    let mut seeds: Vec<_> = [0, 512, CHUNK_BYTES, 3 * CHUNK_BYTES + 512].map(index).to_vec();
    seeds.push(seeds[3][..200].to_vec());
    seeds
}

/// Frames that are right, and some that are not: of another length, changed, followed by another one, and one that grows without end.
pub fn frame_seeds() -> Vec<Vec<u8>> {
    // 800 bytes, and a whole chunk.
    let small = |frame: &[u8]| [&[0, 50][..], frame].concat();
    let large = |frame: &[u8]| [&[0, 0, 0, 0][..], frame].concat();
    let good = compress(&content(b"any", 800));
    vec![
        small(&good),
        small(&compress(&content(b"any", 801))),
        small(&[&good[..], &good].concat()),
        small(&compress(&vec![0; 1 << 20])),
        large(&compress(&vec![0; 64 << 20])),
        large(&[]),
        [&[1, 9, 3], &b"abc"[..]].concat(),
        [&[1, 0, 0, 0, 200], &[7; 200][..]].concat(),
        [&[2, 20, 3], &b"abc"[..], &[9, 0, 3, 1, 4, 0, 2, 0x80]].concat(),
        [&[2, 20, 3], &b"abc"[..], &[9, 0, 0, 0]].concat(),
        [&[3, 20, 3], &b"abc"[..], &[77]].concat(),
    ]
}
