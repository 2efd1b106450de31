#!/usr/bin/env bash
# make_root.sh FOLDER PYTHON [armhf]: make a root file system of Debian for arm64, or for ARM of 32 bits, that runs
# on this machine in emulation.
#
# It contains Debian's Python and two environments, /opt/numpy1 and /opt/numpy2, with NumPy 1.24, Debian's, and
# 2. Of 32 bits it is the first alone, of Debian's packages: nothing else has them. Packages are only unpacked:
# configuring them in emulation takes four minutes, and Python needs nothing of it.
# Nothing is made again while this file is the same.
#
# Exit code 3: this machine cannot do it; the last line of stderr is the reason.
set -euo pipefail
root=$1 python=$2
release=bookworm minor=3.11
arch=${3:-arm64}
packages=python3-minimal,libpython3-stdlib
case $arch in # 64 and \xb7, 32 and \x28: the class and the machine in a program's header
    arm64) emulator=qemu-aarch64-static class='\x02' machine='\xb7' ;;
    armhf)
        emulator=qemu-arm-static class='\x01' machine='\x28'
        packages+=,python3-numpy,python3-psutil,python3-cloudpickle ;;
esac

cannot() { # REASON
    echo "$1" >&2
    exit 3
}

register() { # the emulator, if nothing runs such programs; F: it is found from inside the root
    ! chroot "$root" /bin/true 2>/dev/null || return 0
    local misc=/proc/sys/fs/binfmt_misc
    [ -e $misc/register ] || mount -t binfmt_misc binfmt_misc $misc 2>/dev/null ||
        cannot "binfmt_misc cannot be mounted"
    printf '%s' ":ringcomm-$arch:M::\\x7fELF$class\\x01\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00" \
        "\\x02\\x00$machine\\x00:" \
        '\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:' \
        "$(command -v $emulator):F" 2>/dev/null >$misc/register ||
        cannot "the emulator cannot be registered with binfmt_misc"
    chroot "$root" /bin/true || cannot "the emulator does not run /bin/true of the root file system"
}

download() { # Debian's packages, and the wheels of both environments
    local mirror
    mirror=$(grep -rhoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null |
        head -n 1 || true)
    mirror=${mirror:-http://deb.debian.org/debian}
    debootstrap --variant=minbase --foreign --arch="$arch" --include="$packages" \
        "$release" "$root.new" "${mirror% }" >"$root.log" 2>&1 ||
        cannot "debootstrap could not fetch Debian for $arch from ${mirror% } (see $root.log)"
    local package
    for package in "$root.new"/var/cache/apt/archives/*.deb; do
        dpkg-deb -x "$package" "$root.new"
    done
    rm -r "$root.new"/var/cache/apt/archives "$root.new/debootstrap"
    cp "$root.new/usr/share/base-passwd/passwd.master" "$root.new/etc/passwd"
    cp "$root.new/usr/share/base-passwd/group.master" "$root.new/etc/group"
    if [ "$arch" = armhf ]; then
        unpacked_blas
        virtual "$root.new/opt/numpy1" true
        return
    fi
    wheels "$root.new/opt/numpy1" 'numpy==1.24.*' psutil cloudpickle 'ml_dtypes<0.4'
    wheels "$root.new/opt/numpy2" 'numpy>=2' psutil cloudpickle ml_dtypes \
        pytest pytest-timeout hypothesis
}

unpacked_blas() { # the links to NumPy's libraries, which configuring would make
    local library
    for library in blas lapack; do
        ln -s "$library/lib$library.so.3" "$root.new/usr/lib/arm-linux-gnueabihf/lib$library.so.3"
    done
}

virtual() { # FOLDER SYSTEM: an empty virtual environment, in which Debian's packages can be imported or not
    mkdir -p "$1/bin" "$1/lib/python$minor/site-packages"
    ln -s "/usr/bin/python$minor" "$1/bin/python"
    printf 'home = /usr/bin\ninclude-system-site-packages = %s\n' "$2" >"$1/pyvenv.cfg"
}

wheels() { # FOLDER NEED...: a virtual environment with wheels for arm64
    local folder=$1
    virtual "$folder" false
    "$python" -m pip install -q --no-compile --only-binary=:all: --platform manylinux2014_aarch64 \
        --implementation cp --python-version $minor --target "$folder/lib/python$minor/site-packages" "${@:2}" \
        >"$root.log" 2>&1 || cannot "pip could not fetch wheels for arm64: ${*:2} (see $root.log)"
}

compile() { # FOLDER...: its modules, as configuring does; by this machine's Python where it is the same version
    if [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = $minor ]; then
        "$python" -m compileall -q -s "$root" "${@/#/$root}"
    else
        chroot "$root" /usr/bin/python$minor -m compileall -q "$@"
    fi
}

[ "$(id -u)" -eq 0 ] || cannot "only root can use chroot and register an emulator"
[ "$(uname -m)" = x86_64 ] || cannot "this machine is not x86-64 but $(uname -m)"
for program in debootstrap $emulator dpkg-deb; do
    command -v $program >/dev/null || cannot "there is no $program"
done
made_from=$(cksum <"$0")
if [ "$(cat "$root/made-from" 2>/dev/null)" != "$made_from" ]; then
    echo "making $root"
    rm -rf "$root" "$root.new"
    download
    mv "$root.new" "$root"
    register
    compile "/usr/lib/python$minor" /usr/lib/python3 /opt
    echo "$made_from" >"$root/made-from"
    rm -f "$root.log"
fi
register
