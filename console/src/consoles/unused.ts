// Stands for the parts of noVNC that no screen here can use (build.mjs): logins of VNC and their ciphers, as the daemon lets users
// in; compression of this computer's clipboard, which is never sent; H.264, JPEG and RRE, which QEMU does not send. A server that asks for one of them all the same gets an error, and the connection ends.
export default class Unused {
  decodeRect(): never {
    throw new Error("this encoding is not supported");
  }
}
