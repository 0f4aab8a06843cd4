//! Each format by a few lines of it, and what becomes of bad ones.

mod common;

use spillway_advisor::import::{BlockAction, Format, Import, ImportError, Options, Passed};
use spillway_advisor::{Event, Operation};

type Short = (u64, Operation, u64, u64);

fn short(event: Event) -> Short {
    (event.time_us, event.operation, event.offset_bytes, event.len_bytes)
}

fn import(format: Format, text: &str, options: Options) -> Vec<Short> {
    Import::new(text.as_bytes(), format, options).map(|e| short(e.expect("a good line"))).collect()
}

fn passed<R: std::io::BufRead>(import: &Import<R>) -> Vec<(Passed, u64)> {
    import.passed().collect()
}

/// The events, and what was passed over; all lines must be good.
fn all(format: Format, text: &str, options: Options) -> (Vec<Short>, Vec<(Passed, u64)>) {
    let mut import = Import::new(text.as_bytes(), format, options);
    let events = import.by_ref().map(|e| short(e.expect("a good line"))).collect();
    (events, passed(&import))
}

fn error(format: Format, text: &str) -> String {
    let options = Options { skip_bad: true, ..Options::default() };
    let end = Import::new(text.as_bytes(), format, options).last().expect("an end");
    end.expect_err("all of the file is wrong").to_string()
}

fn of(device: &str) -> Options {
    Options { device: Some(device.into()), ..Options::default() }
}

use Operation::{Discard, Flush, Read, Write, WriteZeroes};

const BLKPARSE: &str = "
  8,16   1        1     0.000000000  4162  Q   W 2048 + 8 [dd]
  8,16   1        2     0.000001120  4162  G   W 2048 + 8 [dd]
  8,16   1        3     0.000004000  4162  I   W 2048 + 8 [dd]
  8,16   1        4     0.000006000  4162  D   W 2048 + 16 [dd]
  8,16   0        5     0.000900001     0  C   W 2048 + 16 [0]
  8,16   1        6     0.001000999  4162  Q  RA 4096 + 256 [cat]
  8,16   1        7     0.002000000  4162  Q   D 8192 + 1024 [fstrim]
  8,16   1        8     0.003000000  4162  Q FWS [jbd2/sdb-8]
  8,16   1        9     0.003500000  4162  Q FWFSM 64 + 8 [jbd2/sdb-8]
  8,16   1       10     0.004000000  4162  Q WZS 16 + 8 [mkfs]
  8,16   0        0     0.004100000     0  m   N cfq workload slice:100
  8,32   1       11     0.004200000  4162  Q   R 0 + 8 [other]
  8,16   1       12     0.004300000  4162  Q   N [smartctl]
CPU0 (8,16):
 Reads Queued:           1,      128KiB
";

#[test]
fn blkparse_by_queue_issue_or_completion() {
    let queued = import(Format::Blkparse, BLKPARSE, of("8,16"));
    let wanted = [
        (0, Write, 2048 * 512, 4096),
        (1000, Read, 4096 * 512, 131_072),
        (2000, Discard, 8192 * 512, 1024 * 512),
        (3000, Flush, 0, 0),
        (3500, Flush, 0, 0),
        (3500, Write, 64 * 512, 4096),
        (4000, WriteZeroes, 16 * 512, 4096),
    ];
    assert_eq!(queued, wanted);
    let by = |block_action| import(Format::Blkparse, BLKPARSE, Options { block_action, ..of("8,16") });
    assert_eq!(by(BlockAction::Issue), [(0, Write, 2048 * 512, 8192)]);
    assert_eq!(by(BlockAction::Complete), [(0, Write, 2048 * 512, 8192)]);
    assert_eq!(import(Format::Blkparse, BLKPARSE, of("8,32")), [(0, Read, 0, 4096)]);
}

/// As blktrace of a guest on a disk of this program has recorded it, and blkparse has written it: a flush, a passthrough
/// command, a merge, followed through (`-t`), and all that stands before and behind.
const RECORDED: &str = "Input file vda.blktrace.0 added
Input file vda.blktrace.1 added
254,32   0        1     0.000000000   247  Q FWS [mkfs.ext4]
254,32   0        2     0.000094333   247  G FWS [mkfs.ext4]
254,32   0        3     0.000235596    38  D  FN [kworker/0:1H]
254,32   0        4     0.000427585     0  C  FN 0 [0]
254,32   0        5     0.000451301     0  C  WS 0 [0]
254,32   0        8     0.001115061   247  P   N [mkfs.ext4]
254,32   0        9     0.001135161   247 UT   N [mkfs.ext4] 1
254,32   0       10     0.001160319   247  A  RA 0 + 32 <- (254,33) 8
254,32   0       11     0.001160500   247  Q  RA 0 + 32 [mkfs.ext4]
254,32   0       12     0.001203154   247  D  RA 0 + 32 (    1203) [mkfs.ext4]
254,32   0       13     0.001330986     0  C  RA 0 + 32 (  127832) [0]
254,32   1       14     0.002000000   300  Q   R 36 (12 00 00 00 24 00) [sg_inq]
254,32   1       15     0.002000100   300  D   R 36 (12 00 00 00 24 00) [sg_inq]
254,32   1       16     0.002000200   300  C   R (12 00 00 00 24 00) [0]
254,32   1       17     0.002000300   300  C   N [0]
254,32   0       18     0.003000000   247  X  WS 64 / 96 [mkfs.ext4]
254,32   0       19     0.004000000   247  Q FWFSM 64 + 8 [jbd2]
254,32   0       20     0.004000000   247  R WFSM 64 + 8 [0]
254,32   0       21     0.004000000   247  D WFSM 64 + 8 [jbd2]
254,32   0       22     0.004000000   247  C WFSM 64 + 8 (    1234) [0]
254,32   0        0     0.004100000     0  m   N cfq workload slice:100

mkfs.ext4 (247, ...)
 Reads Queued:           1,       16KiB	 Writes Queued:           1,        4KiB
 PC Reads Queued:        1,        0KiB	 PC Writes Queued:        0,        0KiB
CPU0 (254,32):
 Reads Queued:           1,       16KiB	 Writes Queued:           1,        4KiB
 Read depth:             1        	 Write depth:             1
 IO unplugs:             1        	 Timer unplugs:           0

Total (254,32):
 Reads Completed:        1,       16KiB	 Writes Completed:        1,        4KiB

Throughput (R/W): 4,000KiB/s / 1,000KiB/s
Events (254,32): 22 entries
Skips: 0 forward (0 -   0.0%)
";

#[test]
fn a_whole_recording_of_blktrace_is_imported_by_each_event() {
    let by = |block_action| all(Format::Blkparse, RECORDED, Options { block_action, ..Options::default() });
    let headings = (Passed::Heading, 14);
    let (queued, beside) = by(BlockAction::Queue);
    assert_eq!(
        queued,
        [(0, Flush, 0, 0), (1160, Read, 0, 16_384), (4000, Flush, 0, 0), (4000, Write, 32_768, 4096)]
    );
    assert_eq!(beside, [(Passed::OtherEvent, 17), (Passed::Command, 1), headings]);
    let (issued, beside) = by(BlockAction::Issue);
    assert_eq!(issued, [(0, Flush, 0, 0), (968, Read, 0, 16_384), (3765, Write, 32_768, 4096)]);
    assert_eq!(beside, [(Passed::OtherEvent, 17), (Passed::Command, 1), headings]);
    let (completed, beside) = by(BlockAction::Complete);
    assert_eq!(completed, [(0, Flush, 0, 0), (903, Read, 0, 16_384), (3573, Write, 32_768, 4096)]);
    assert_eq!(beside, [(Passed::OtherEvent, 15), (Passed::NoData, 1), (Passed::Command, 2), headings]);

    let twice = error(Format::Blkparse, &RECORDED.repeat(2));
    assert!(twice.contains("two recordings") && twice.contains("each by itself"), "{twice}");
}

#[test]
fn parts_that_were_joined_are_one_trace() {
    let part = |hour: u64| {
        format!(
            "Timestamp,Response,IOType,LUN,Offset,Size\n{0}.013118000,0.001,W,0,4096,4096\n{0}.113118000,,,0,0,0\n\
             {0}.213118000,0.001,R,0,8192,0\n{0}.313118000,0.001,R,1,8192,4096\n",
            1_456_135_200 + 3600 * hour
        )
    };
    let (events, beside) = all(Format::Systor17, &[part(0), part(1)].concat(), of("0"));
    assert_eq!(events, [(0, Write, 4096, 4096), (3_600_000_000, Write, 4096, 4096)]);
    let expected =
        [(Passed::OtherDevice, 2), (Passed::NoOperation, 2), (Passed::Empty, 2), (Passed::Heading, 2)];
    assert_eq!(beside, expected);
    // In the wrong order nothing is lost but the times, and that is told.
    let text = [part(1), part(0)].concat();
    let mut wrong = Import::new(text.as_bytes(), Format::Systor17, of("0"));
    let times: Vec<_> = wrong.by_ref().map(|e| e.expect("good").time_us).collect();
    assert_eq!((times, wrong.went_back()), (vec![0, 0], (1, 3_600_000_000)));

    for (format, names, line) in [
        (
            Format::Msr,
            "Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime",
            "128166372003061629,hm,0,Read,0,4096,413",
        ),
        (Format::Alibaba, "device_id,opcode,offset,length,timestamp", "0,R,0,4096,1577808000000626"),
        (Format::Tencent, "Timestamp,Offset,Size,IOType,VolumeID", "1538323200,0,8,0,0"),
    ] {
        let text = [names, line, names, line, ""].join("\r\n");
        let (events, beside) = all(format, &text, Options::default());
        assert_eq!(events, [(0, Read, 0, 4096); 2], "{names}");
        assert_eq!(beside, [(Passed::Heading, 2)], "{names}");
        // What only looks like names is no heading.
        for bad in ["traces/\0\0\0ustar  \0root\0root,12910952,128,0,1063", "Timestamp,Offset", "a,1,2,3,4"] {
            let text = format!("{bad}\n{line}\n");
            let first = Import::new(text.as_bytes(), format, Options::default()).next();
            assert!(first.is_some_and(|e| e.is_err()), "{names}: {bad}");
        }
    }
    for version in [2, 3] {
        let log = format!("fio version {version} iolog\n");
        let format = if version == 2 { Format::FioV2 } else { Format::FioV3 };
        let twice = error(format, &log.repeat(2));
        assert!(twice.contains("line 2: another log begins here"), "{twice}");
    }
}

#[test]
fn fio_logs_of_both_versions() {
    let v2 = "fio version 2 iolog\n/dev/vda add\n/dev/vda open\n/dev/vda write 4096 8192\n/dev/vda wait 1500 0\n\
              /dev/vda read 0 512\n/dev/vda wait 500 0\n/dev/vda trim 0 65536\n/dev/vda sync 0 0\n/dev/vda close\n";
    let wanted =
        [(0, Write, 4096, 8192), (1500, Read, 0, 512), (2000, Discard, 0, 65_536), (2000, Flush, 0, 0)];
    assert_eq!(import(Format::FioV2, v2, Options::default()), wanted);
    let v3 = "fio version 3 iolog\n2 vda add\n870 vda open\n878 vda write 0 16384\n888 vda datasync 0 0\n\
              10001677 vda read 512 512\n10001680 vda close\n";
    let wanted = [(0, Write, 0, 16_384), (10, Flush, 0, 0), (10_000_799, Read, 512, 512)];
    assert_eq!(import(Format::FioV3, v3, Options::default()), wanted);
    let late = format!("\n{v2}");
    assert!(
        Import::new(late.as_bytes(), Format::FioV2, Options::default()).next().is_some_and(|e| e.is_err())
    );
    let error = Import::new(v2.as_bytes(), Format::FioV3, Options { skip_bad: true, ..Options::default() })
        .next()
        .expect("an end")
        .expect_err("the other version");
    assert_eq!(
        error.to_string(),
        "line 1: it does not begin with 'fio version 3 iolog': is --format the other version's?"
    );
}

#[test]
fn the_public_csv_traces() {
    let msr = "128166372003061629,hm,1,Read,383496192,32768,413\n128166372016382155,hm,1,Write,2822144,4096,7\n\
               128166372026382245,prxy,0,Write,0,4096,7\n";
    let wanted = [(0, Read, 383_496_192, 32_768), (1_332_053, Write, 2_822_144, 4096)];
    assert_eq!(import(Format::Msr, msr, of("hm.1")), wanted);
    let mut begun = Import::new(msr.as_bytes(), Format::Msr, of("hm.1"));
    assert_eq!(begun.by_ref().count(), 2);
    assert_eq!(
        (begun.begin_unix_us(), passed(&begun)),
        (Some(1_172_163_600_306_162), vec![(Passed::OtherDevice, 1)])
    );

    let systor = "Timestamp,Response,IOType,LUN,Offset,Size\n1456135200.013118000,0.0012,W,3,8192,4096\n\
                  1456135200.013119999,,,3,0,0\n1456135201.5,0.1,R,3,512,512\n";
    assert_eq!(
        import(Format::Systor17, systor, Options::default()),
        [(0, Write, 8192, 4096), (1_486_882, Read, 512, 512)]
    );

    let alibaba = "419,W,8192,16384,1577808000000626\n420,R,0,4096,1577808000000700\n419,R,8192,4096,1577808001000626\n";
    let wanted = [(0, Write, 8192, 16_384), (1_000_000, Read, 8192, 4096)];
    assert_eq!(import(Format::Alibaba, alibaba, of("419")), wanted);

    let tencent = "1538323200,12910952,128,0,1063\n1538323201,0,8,1,1063\n";
    let wanted = [(0, Read, 12_910_952 * 512, 65_536), (1_000_000, Write, 0, 4096)];
    assert_eq!(import(Format::Tencent, tencent, Options::default()), wanted);
}

#[test]
fn a_bad_line_is_named_or_skipped_and_counted() {
    let text = "419,W,8192,4096,100\n419,X,8192,4096,101\n419,W,8192\n419,W,x,4096,102\n419,W,0,99999999999999,103\n\
                419,R,0,4096,104\n";
    let mut strict = Import::new(text.as_bytes(), Format::Alibaba, Options::default());
    assert!(strict.next().is_some_and(|e| e.is_ok()));
    let error = strict.next().expect("an error").expect_err("a bad line");
    assert!(matches!(error, ImportError::Line { line: 2, .. }));
    assert_eq!(error.to_string(), "line 2: operation 'X' is neither R nor W");
    assert!(strict.next().is_none(), "it is the end");

    let mut lenient =
        Import::new(text.as_bytes(), Format::Alibaba, Options { skip_bad: true, ..Options::default() });
    assert_eq!(lenient.by_ref().filter(Result::is_ok).count(), 2);
    assert_eq!((lenient.skipped(), lenient.lines()), (4, 6));
}

#[test]
fn of_two_devices_one_must_be_named() {
    let text = "1,W,0,4096,1\n2,W,0,4096,2\n";
    let options = Options { skip_bad: true, ..Options::default() };
    let error =
        Import::new(text.as_bytes(), Format::Alibaba, options).nth(1).expect("an end").expect_err("two");
    assert_eq!(error.to_string(), "line 2: devices '1' and '2': say which one is wanted");
}

#[test]
fn no_bytes_do_harm() {
    let mut rng = common::Rng(common::seed());
    let words = [
        "8,0",
        "1",
        " ",
        ",",
        "Q",
        "W",
        "+",
        "-1",
        "99999999999999999999",
        "1.5",
        "R",
        "\n",
        "wait",
        "é",
        "F",
    ];
    for _ in 0..3000 {
        let text: String =
            (0..rng.below(80)).map(|_| words[rng.below(words.len() as u64) as usize]).collect();
        let bytes: Vec<u8> = (0..rng.below(200)).map(|_| rng.below(256) as u8).collect();
        for format in Format::ALL {
            let options = || Options { skip_bad: true, ..Options::default() };
            Import::new(text.as_bytes(), format, options()).for_each(drop);
            Import::new(&bytes[..], format, options()).for_each(drop);
        }
    }
    // A line without end takes no more than a line's memory.
    let endless = std::io::BufReader::new(std::io::Read::take(std::io::repeat(b'x'), 1 << 24));
    let ends: Vec<_> =
        Import::new(endless, Format::Msr, Options { skip_bad: true, ..Options::default() }).collect();
    assert!(matches!(ends[..], [Err(ImportError::Line { line: 1, .. })]));
}

#[test]
fn formats_have_names() {
    for format in Format::ALL {
        assert_eq!(format.name().parse(), Ok(format));
    }
    assert!("csv".parse::<Format>().is_err_and(|e| e.contains("alibaba")));
}
