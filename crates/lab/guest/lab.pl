#!/usr/bin/perl
# Work of the lab inside of a machine. Says that the machine is up, waits for the host's word on the third serial port, works, and
# reports JSON lines on the second one: what users did by this machine's clock, and each second what its kernel counted.
# /run/payload/words has what is to be done, a word and its value in each line. Only what perl-base has is used.
use strict;
use warnings;
use IO::Handle;

our %word;
our @fio;

sub now {
    my $time = pack 'qq', 0, 0;
    syscall(228, 1, $time) == 0 or die "no clock: $!"; # clock_gettime, CLOCK_MONOTONIC, x86-64
    my ($s, $ns) = unpack 'qq', $time;
    return $s + $ns / 1e9;
}

open my $to_host, '>', '/dev/ttyS1' or exit 1;

sub report {
    my $line = sprintf(shift, @_) . "\n";
    syswrite($to_host, $line) == length $line or exit 1;
}

# Ends the work; the host ends the machine.
sub give_up {
    my $why = join ' ', @_;
    $why =~ s/[^ -~]+/ /g;
    $why =~ s/["\\%]/'/g;
    report('{"error":"' . $why . '"}');
    exit 1;
}
$SIG{__DIE__} = \&give_up;

sub slurp {
    open my $file, '<', $_[0] or die "$_[0]: $!";
    local $/;
    return scalar <$file>;
}

# What the kernel has counted since it started, when that was, and whether work begins there.
sub inside {
    my ($begins, $at) = (shift ? 'true' : 'false', now());
    my ($r, $rs, $w, $ws) = slurp('/proc/diskstats') =~ /^ *\d+ +\d+ +$word{disk} (\d+) \d+ (\d+) \d+ (\d+) \d+ (\d+)/m
        or die "no disk $word{disk}";
    # Neither idle, nor waiting for a disk, nor taken by the host.
    my @ticks = (split ' ', slurp('/proc/stat'))[1 .. 7];
    my $busy = ($ticks[0] + $ticks[1] + $ticks[2] + $ticks[5] + $ticks[6]) / 100;
    report('{"inside":{"reads":%d,"read_bytes":%d,"writes":%d,"written_bytes":%d,"cpu_s":%.2f},"at":%.6f,"begins":%s}',
        $r, $rs * 512, $w, $ws * 512, $busy, $at, $begins);
}

for (split /\n/, slurp('/run/payload/words')) {
    my ($name, $value) = split ' ', $_, 2;
    if ($name eq 'fio') { push @fio, $value } else { $word{$name} = $value }
}
report('{"up":%.6f}', now());
exit 0 if $word{work} eq 'boot';

# Files that live a few seconds reach the disk whatever the pace, as on a system with a lazy writer each second.
for ('dirty_writeback_centisecs', 'dirty_expire_centisecs') {
    open my $file, '>', "/proc/sys/vm/$_" or die "$_: $!";
    print $file 100;
    close $file or die "$_: $!";
}
do "/run/payload/$word{work}.pl" or die "$word{work}.pl: ", $@ || $!;
open my $from_host, '<', '/dev/ttyS2' or die "/dev/ttyS2: $!";
prepare();
system('sync') == 0 or die 'sync failed';

my $parent = $$;
my $sampler = fork // die "fork: $!";
if (!$sampler) {
    while (getppid() == $parent) {
        inside();
        select undef, undef, undef, 1;
    }
    exit 0;
}
report('{"ready":%.6f}', now());
defined <$from_host> or die 'the host has gone';
# What was before does not count.
inside('begins');
work();
system('sync') == 0 or die 'sync failed';
kill 'TERM', $sampler;
waitpid $sampler, 0;
inside();
report('{"done":%.6f}', now());
