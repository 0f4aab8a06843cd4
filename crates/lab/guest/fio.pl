# Loads by fio: each line of words is a name and fio's options. The one called `fill` is done before the work.
use strict;
use warnings;
our (%word, @fio);

sub fio {
    my ($name, $options) = split ' ', $_[0], 2;
    my $begin = now();
    system("fio --name=$name $options --output-format=json --output=/run/fio.json >/run/fio.log 2>&1") == 0
        or die "fio $name: ", -s '/run/fio.log' ? slurp('/run/fio.log') : '', ' ', substr(slurp('/run/fio.json'), 0, 600);
    my $json = slurp('/run/fio.json');
    $json =~ s/\s+/ /g;
    report('{"fio":"%s","at":%.6f,"took_ms":%.3f,"json":%s}', $name, $begin, (now() - $begin) * 1000, $json);
}

sub prepare { fio($_) for grep { /^fill / } @fio }

sub work { fio($_) for grep { !/^fill / } @fio }

1;
